"""What a recipe needs of a machine, known before the machine is there.

chips.py           what one device has: memory, products per second, bandwidth
topology.py        devices of a TPU slice that is not there
vocabulary.py      sizes of the published vocabularies, so that no text is needed
compile_ahead.py   the train step and the scoring steps compiled; ``--mode=compile``
costs.py           what a compiled program holds, computes and exchanges
products.py        floating-point operations of a model, by formula
prediction.py      time of a step, from these and a few assumptions
"""
