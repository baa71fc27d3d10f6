"""The Transformer-XL model. Each file has one part of it.

These letters stand for the axes of arrays, in docstrings and in einsum strings:

    B  streams (rows of a batch)       N  attention heads        V  vocabulary
    T  tokens of a segment             H  width of a head        L  layers
    M  slots of memory                 D  width of the model     C  tokens of recomputed context,
    K  = M + T keys                    F  width inside the          or tail clusters of an
    R  rows of a table of positions       feed-forward layer        adaptive softmax

One forward pass, from top to bottom, with the file of each step:

    mems.hidden [L,B,M,D]   tokens [B,T]
          │                   │ embedding, times sqrt(D)               adaptive.py
          │                 h [B,T,D]
          │                   │      R [K,D] sinusoids of distances     positions.py
          │                   │      mask: the attention mask          masks.py
          │     ┌─────────────┴───── for each layer n ────────────┐
          ├──m──▶ q from h;  k, v from [stop_gradient(m); h]      │     attention.py
          │     │ softmax((a) + (b) + (c) + (d)) over K keys      │     scores.py, kernels/
          │     │ h = LN(h + attention);  h = LN(h + FF(h))       │     block.py
          │     └─────────────┬───────────────────────────────────┘
          │                 h [B,T,D]
          ▼                   │ logits [B,T,V], or nll [B,T]           adaptive.py,
    the last M of [m; layer's input], gradient stopped: memory.py        cross_entropy.py

transformer_xl.py assembles these parts. For inference, ``init_cache`` projects the memory to keys
and values once, and these then replace the memory.
"""
