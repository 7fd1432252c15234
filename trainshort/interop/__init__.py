"""Other people's models in, ours out: one file a format, its weight names as data.

    formats.py       what a format is, and the exact ways in which its tensors are ours turned round
    mpt.py ...       one format each: which settings it has, which names
    pickles.py       PyTorch's pickles, read without executing anything
    weight_files.py  safetensors, read and written a tensor at a time
    importing.py     a source becomes a whole run folder
    converting.py    a model with other positions becomes an ALiBi model
    exporting.py     a run becomes a folder of another program, which verifying.py asks (runtimes.py)
    harness.py       tasks of lm-evaluation-harness, whose names task_names.py knows sooner
    patch.py         our attention in a loaded model of transformers (seen.py, patched.py, families.py: how)
    doctor.py        what such a model gets wrong (probes.py), found on a tiny copy of it (specimen.py)

Nothing here runs code that came with a model, and optional packages are imported where they are used.
"""
