"""Import models of other programs, export runs to other programs, and use ALiBi attention in Hugging Face models.

    formats/            model formats that can be imported or converted
    import_model.py     import a model as a run folder
    convert.py          convert a model with other positions to ALiBi
    export/             export targets, and the comparison of an export with its run
    lm_eval.py          tasks of lm-evaluation-harness
    patch/              ALiBi attention for loaded Hugging Face models
    doctor/             find errors in Hugging Face models with ALiBi
    safe_unpickle.py    read PyTorch pickles without executing code
    safetensors_io.py   read and write safetensors one tensor at a time

No code that comes with a model is executed.
"""
