"""The model, one idea per file.

Letters of every axis, in docstrings and in einsum strings alike:

    B  streams (rows of a batch)       N  attention heads        V  vocabulary
    T  tokens of a segment             H  width of a head        L  layers
    M  slots of memory                 D  width of the model
    K  = M + T keys                    F  width inside the feed-forward layer

One forward pass (read the files in this order):

    mems.hidden [L,B,M,D]   tokens [B,T]
          │                   │ embedding, times sqrt(D)               transformer_xl.py
          │                 h [B,T,D]
          │                   │      R [K,D] sinusoids of distances     positions.py
          │                   │      allowed [B,T,K] who sees whom      masks.py
          │     ┌─────────────┴───── for each layer n ────────────┐
          ├──m──▶ q from h;  k, v from [stop_gradient(m); h]      │     attention.py
          │     │ softmax((a) + (b) + (c) + (d)) over K keys      │
          │     │ h = LN(h + attention);  h = LN(h + FF(h))       │     block.py
          │     └─────────────┬───────────────────────────────────┘
          │                 h [B,T,D]
          ▼                   │ output layer: logits [B,T,V] or nll [B,T]
    the last M of [m; layer's input], gradient stopped                  memory.py
"""
