"""A hundred wrong inputs over all commands: exit 2, one sentence that helps, nothing written."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from trainshort.cli.main import COMMANDS, main
from trainshort.data.corpora import corpora

RUN = "runs/tiny"
TRAIN = "train demo-alibi --data.folder data/tiny"

WRONG = [
    # no command, other commands
    ("trian demo-alibi", "Unknown command 'trian'. Did you mean 'train'? See trainshort --help."),
    ("--plugin mine.py list", "--plugin comes after the command: trainshort COMMAND --plugin FILE.py."),
    ("--halp", "Unknown command '--halp'. See trainshort --help."),
    ("PREPARE text.txt", "Unknown command 'PREPARE'. Did you mean 'prepare'? See"),
    # prepare
    ("prepare", "CORPUS is missing: Corpus name (see `trainshort list corpora`), file,"),
    ("prepare sotuu", "'sotuu' is neither a known corpus nor a file or folder. Did you mean"),
    ("prepare empty", "empty holds no .txt, .md, .tokens, .raw, .jsonl, .parquet file. Name"),
    ("prepare nothing.txt", "nothing.txt is empty. Give a file with text in it."),
    ("prepare blank.txt", "'blank.txt' holds nothing but white space. Give files with text in them."),
    (
        "prepare text.txt --tokenizer no/tokenizer.json",
        "There is no tokenizer no/tokenizer.json. Use bpe, bytes",
    ),
    ("prepare five --plugin five.py", "The corpus 'five' should be a Corpus, such as file_corpus makes of paths"),
    ("prepare nowhere/*.txt", "No .txt, .md, .tokens, .raw, .jsonl, .parquet file matches"),
    ("prepare text.txt --tokenizer byte", "'byte' is no tokenizer: use bpe, bytes, words or the path of a"),
    (
        "prepare text.txt --tokenizer hf/config.json",
        "hf/config.json is not a tokenizer.json that the tokenizers library",
    ),
    ("prepare text.txt --out ''", "--out is a path, got an empty word."),
    ("prepare text.txt --vocab-size many", "--vocab-size is a whole number, got 'many'."),
    ("prepare text.txt --vocab-size -5", "Setting 'vocab_size' cannot be -5: input should be greater than or"),
    ("prepare text.txt --vocab-size 99999999999", "Setting 'vocab_size' cannot be 99999999999: input should be less"),
    ("prepare someone/nowhere", "'someone/nowhere' is no file or folder here or in $TRAINSHORT_DATA, and the hub does"),
    ("prepare text.txt --vocab-size 3", "bpe needs a vocabulary of at least 257 (the bytes and an end token),"),
    ("prepare text.txt --workers 0", "workers must be at least 1, not 0."),
    ("prepare text.txt --errors ignore", "--errors is one of strict, replace; got 'ignore'."),
    ("prepare text.txt --out /proc/foo", "The folder /proc/foo cannot be made: no such file or directory."),
    ("prepare text.txt --out text.txt", "text.txt is a file, and a folder was expected there. Choose another"),
    ("prepare number.jsonl", "number.jsonl, line 2: expected an object with a string in its field"),
    ("prepare broken.jsonl", "broken.jsonl, line 2, is not JSON (Expecting value at its character"),
    ("prepare latin.txt --tokenizer bytes", "latin.txt is not valid UTF-8 at byte 3 (0xe9). Convert the file, or"),
    ("prepare text.txt --tokeniser bytes", "Unknown setting 'tokeniser'. Did you mean 'tokenizer'? See trainshort"),
    ("prepare text.txt other.txt", "'other.txt' is one word too many. See trainshort prepare --help."),
    ("prepare archive.zip", "archive.zip should end in one of .txt, .md, .tokens, .raw, .jsonl,"),
    (
        "prepare text.txt --tokenizer bytes --out data/tiny",
        "data/tiny was prepared from tokenizer 'bpe', not 'bytes'. Choose",
    ),
    # train
    ("train", "Name a recipe first: trainshort train RECIPE [options]. trainshort"),
    ("train --steps 3", "Name a recipe first: trainshort train RECIPE [options]. trainshort"),
    ("train nowhere.json", "No config at nowhere.json. Is this a run folder? It should hold"),
    ("train ''", "Name a recipe first: trainshort train RECIPE [options]. trainshort"),
    (
        f"{TRAIN} --data.tokenizer wrds",
        "--data.folder data/tiny is prepared data with a corpus and tokenizer of its own",
    ),
    (f"{TRAIN} --corpus text.txt", "leave out --data.corpus, or leave out --data.folder to have the text prepared."),
    ("train demo-alibbi", "Unknown recipe 'demo-alibbi'. Did you mean 'demo-alibi'? Known:"),
    ("train empty", "No config at empty/config.json. Is this a run folder? It should hold"),
    (f"{TRAIN} --model.position alibbi", "Unknown position method 'alibbi'. Did you mean 'alibi'? Known: alibi,"),
    (f"{TRAIN} --train.stepz 3", "Unknown setting 'train.stepz'. Did you mean 'train.steps'? See"),
    (f"{TRAIN} --stepz 3", "Unknown setting 'stepz'. Did you mean 'steps'? See"),
    (f"{TRAIN} --steps many", "--train.steps is a whole number, got 'many'."),
    (f"{TRAIN} --colour red", "Unknown setting 'colour'. See trainshort train --help."),
    (f"{TRAIN} --vocab-size 3", "'vocab_size' could be model.vocab_size or data.vocab_size; write one"),
    (f"{TRAIN} --format 2", "Unknown setting 'format'"),
    (f"{TRAIN} --model.positon alibi", "Unknown setting 'model.positon'. Did you mean 'model.position'? See"),
    (f"{TRAIN} --model.heads 7", "In 'model': width 128 is not a multiple of heads 7; choose width 126"),
    (f"{TRAIN} --model.layers 0", "Setting 'model.layers' cannot be 0: input should be greater than or"),
    (f"{TRAIN} --model.width 1.5", "--model.width is a whole number, got '1.5'."),
    (f"{TRAIN} --model.width 99999999", "In 'model': width 99999999 is not a multiple of heads 8; choose width"),
    (f"{TRAIN} --model.dropout 2", "Setting 'model.dropout' cannot be 2.0: input should be less than 1."),
    (f"{TRAIN} --train.steps -1", "Setting 'train.steps' cannot be -1: input should be greater than or"),
    (f"{TRAIN} --train.length 0", "Setting 'train.length' cannot be 0: input should be greater than or"),
    (f"{TRAIN} --train.length 100000", "The text has 4754 tokens, but one sequence of length 100000 needs"),
    (f"{TRAIN} --train.seed 99999999999999999999", "Setting 'train.seed' cannot be 99999999999999999999: input"),
    (f"{TRAIN} --optim.lr inf", "Setting 'optim.lr' cannot be inf: input should be a finite number."),
    (f"{TRAIN} --optim.betas 0.9 2", "In 'optim.betas': both are at least 0 and less than 1, got 0.9 and 2.0."),
    (f"{TRAIN} --model 5", "Unknown setting 'model'."),
    (f"{TRAIN} --model.adaptive 5", "Unknown setting 'model.adaptive'."),
    (f"{TRAIN} --modle.width 5", "Unknown setting 'modle.width'. Did you mean 'model.width'? See"),
    (f"{TRAIN} --learning-rate 1", "Unknown setting 'learning-rate'. See"),
    (f"{TRAIN} --train.lr nan", "Unknown setting 'train.lr'."),
    (f"{TRAIN} --train.batch 0", "Setting 'train.batch' cannot be 0: input should be greater than or"),
    (f"{TRAIN} --out /proc/foo", "The folder /proc/foo cannot be made: no such file or directory."),
    ("train demo-alibi --corpus text.txt --out /proc/foo", "The folder /proc/foo cannot be made: no such"),
    (f"{TRAIN} --out {RUN}", "runs/tiny already exists. Go on with it by --resume, or choose"),
    (f"{TRAIN} --parallel magic", "--train.parallel is one of ddp, fsdp, hsdp; got 'magic'."),
    (f"{TRAIN} --plugin nowhere.py", "nowhere.py. Give --plugin the path of a Python file."),
    (f"{TRAIN} --plugin broken.py", "broken.py does not import: ZeroDivisionError: division by zero (line"),
    (f"{TRAIN} --plugin", "--plugin needs a path. Give --plugin the path of a Python file."),
    ("train demo-alibi --data.folder data/tinny", "data.folder data/tinny is not a prepared data folder (it has no"),
    ("train demo-alibi --data.folder text.txt", "data.folder text.txt is a file. Turn it into tokens by `trainshort"),
    ("train demo-alibi --data.folder empty", "Make it by `trainshort prepare sotu --out empty`, or leave data"),
    ("train demo-alibi --data.folder runs", "(it has no meta.json). Name one that `trainshort prepare` made, or"),
    (
        "train text.txt",
        "is a file, and neither a recipe nor a run folder nor a config.json. To train on a text: trainshort",
    ),
    ("train odd.json", "In odd.json: Setting 'model' cannot be 5: it is a group of settings."),
    ("train runs/cut --resume --train.steps 20", "(step-000000008: model/whole.safetensors has 1000 bytes instead of"),
    (f"train {RUN} --resume --train.steps 3", "runs/tiny has done 8 steps already, and train.steps=3 asks for fewer."),
    ("train hf", "hf/config.json is of a Hugging Face model"),
    ("train hf/config.json", "hf/config.json is of a Hugging Face model"),
    # evaluate
    ("evaluate", "RUN is missing: A run folder, one of its checkpoints, a Hugging Face"),
    ("evaluate ''", "RUN is empty: A run folder, one of its checkpoints, a Hugging Face"),
    ("evaluate runs/cut", "None of the 1 checkpoints in runs/cut is whole (step-000000008: model/whole"),
    (
        f"evaluate {RUN} --device mps",
        "the device 'mps' is not available here (Could not run 'aten::empty.memory_format'",
    ),
    (
        f"evaluate {RUN} --device meta",
        "the device 'meta' is not available here (Cannot copy out of meta tensor; no data",
    ),
    (
        f"evaluate {RUN} --data ''",
        "A corpus is a name, path, glob or hub dataset of 1 to 4096 characters, got an empty",
    ),
    (
        f"evaluate {RUN} --lengths 1x --split valdi --out new",
        "data/tiny has no split 'valdi'; it has train, valid, test.",
    ),
    ("evaluate .", "There is no run at '.'. Give a run folder, or one of the"),
    ("evaluate runs", "There is no run at 'runs'. Give a run folder, or one of the"),
    ("evaluate runs/tinny", "There is no run or model at 'runs/tinny'."),
    ("evaluate data/tiny", "There is no run at 'data/tiny'. Give a run folder, or one of the"),
    ("evaluate text.txt", "text.txt is a file. Give a run folder"),
    ("evaluate hf --lengths 16", "Cannot load 'hf'"),
    (f"evaluate {RUN} --lengths", "--lengths needs a value: --lengths TEXT."),
    (f"evaluate {RUN} --lengths 0", "lengths are positive whole numbers (128,256), multiples of the"),
    (f"evaluate {RUN} --lengths 0x", "lengths are positive whole numbers (128,256), multiples of the"),
    (f"evaluate {RUN} --lengths long", "lengths are positive whole numbers (128,256), multiples of the"),
    (f"evaluate {RUN} --lengths 1e99", "lengths are positive whole numbers (128,256), multiples of the"),
    (
        f"evaluate {RUN} --lengths 999999999 9999999999",
        "9,999,999,999",
    ),
    (
        f"evaluate {RUN} --lengths 16 64 --max-tokens 10",
        "Length 64 gives the same result as length 16",
    ),
    (f"evaluate {RUN} --lengths 1x --split valdi", "data/tiny has no split 'valdi'; it has train, valid, test."),
    (f"evaluate {RUN} --lengths 1x --data nowhere", "'nowhere' is neither a known corpus nor a file or folder. Known:"),
    (f"evaluate {RUN} --lengths 1x --stride 0", "the stride must be between 1 and the length 16, got 0; the length"),
    (f"evaluate {RUN} --lengths 1x --stride 99", "the stride must be between 1 and the length 16, got 99; the length"),
    (
        f"evaluate {RUN} --lengths 1x --slopes max_bias=x",
        "--slopes: expected interpolate, ntk=4, clamp=512, max_bias=16 or window=512, got 'max_bias=x'.",
    ),
    (
        f"evaluate {RUN} --lengths 1x --slopes steep",
        "--slopes: expected interpolate, ntk=4, clamp=512, max_bias=16 or window=512, got 'steep'.",
    ),
    (f"evaluate {RUN} --lengths 1x --precision float8", "Unknown precision 'float8'."),
    (f"evaluate {RUN} --lengths 1x --device gpu", "the device 'gpu' is not available here (torch knows no such kind)."),
    (
        f"evaluate {RUN} --lengths 1x --device cuda:7",
        "the device 'cuda:7' is not available here (Torch not compiled with",
    ),
    (f"evaluate {RUN} --lengths 1x --max-tokens 0", "--max-tokens must be at least 1, got 0."),
    (f"evaluate {RUN} --lengths 1x --memory -1", "--memory is a number of gigabytes above 0, got -1.0."),
    (f"evaluate {RUN} --lengths 1x --batch-tokens 0", "--batch-tokens must be at least 1, got 0."),
    # analyze
    ("analyze", "RUN is missing: A run folder or checkpoint; a Hugging Face model for"),
    ("analyze runs/tinny", "There is no run or model at 'runs/tinny'."),
    (f"analyze {RUN} --only recal", "Unknown analysis 'recal'. Did you mean 'recall'? Known: far-context,"),
    (f"analyze {RUN} --only reach,recal", "Unknown analysis 'recal'. Did you mean 'recall'? Known: far-context,"),
    (f"analyze {RUN} --only ''", "--only names nothing, got '': Analyses by name. Default: all that fit"),
    (f"analyze {RUN} --only", "--only needs a value: --only TEXT."),
    ("analyze runs/cut", "None of the 1 checkpoints in runs/cut is whole (step-000000008: model/whole"),
    (f"analyze {RUN} --only reach recall --lengths 9999", "An analysis at length 9,999 requires a text"),
    (
        f"analyze {RUN} --only reach recall --lengths 4",
        "requires a distance of at least 32 tokens. None of 4",
    ),
    (
        f"analyze {RUN} --only recall --lengths 100 --trained-at 900",
        "Recall at a distance of 100 tokens requires an input of 566",
    ),
    (
        f"analyze {RUN} --only far-context --lengths 2",
        "at length 2. Use longer --lengths or",
    ),
    (f"analyze {RUN} --only reach --samples 0", "--samples must be at least 1, got 0."),
    (f"analyze {RUN} --only reach --lengths -4", "lengths are positive whole numbers (128,256), multiples of the"),
    (f"analyze {RUN} --only reach --split all", "data/tiny has no split 'all'; it has train, valid, test."),
    (
        f"analyze {RUN} --only reach --out text.txt/inside",
        "The folder text.txt/inside cannot be made: a file is in the way",
    ),
    (f"analyze {RUN} --only reach --trained-at 0", "--trained-at must be at least 1, got 0."),
    (f"analyze {RUN} --only recall --seed -1", "--seed must be at least 0, got -1."),
    (f"analyze {RUN} --only reach --seed x", "--seed is a whole number, got 'x'."),
    ("analyze hf --only reach", "Cannot load 'hf'"),
    # generate
    ("generate", "RUN is missing: A run folder, one of its checkpoints, or a"),
    ("generate runs/cut the", "None of the 1 checkpoints in runs/cut is whole (step-000000008: model/whole"),
    (f"generate {RUN} the --tokenizer nowhere.json", "There is no tokenizer at nowhere.json. Use bytes, words or bpe"),
    (f"generate {RUN} the --slopes steep", "--slopes: expected interpolate, ntk=4,"),
    (f"generate {RUN} the --rotary linear=2", "--rotary requires a model with rotary or xpos positions"),
    ("generate hf the", "hf is a model of type 'gpt2', with learned positions; trainshort convert makes an"),
    ("generate runs/tinny the", "There is no run folder runs/tinny. `ls runs` shows the runs made"),
    (f"generate {RUN} the --seed 99999999999999999999", "Setting 'seed' cannot be 99999999999999999999: input"),
    ("generate text.txt the", "text.txt is a file, and a checkpoint is a folder of safetensors and"),
    (f"generate {RUN}", "the prompt is empty. Give a text to continue, --prompt-file FILE, or"),
    (f"generate {RUN} ''", "the prompt is empty. Give a text to continue, --prompt-file FILE, or"),
    (f"generate {RUN} the --endless --tokens 3", "--endless goes on until stopped; it does not go with --tokens,"),
    (f"generate {RUN} the --tokens -1", "Setting 'tokens' cannot be -1: input should be greater than or equal"),
    (f"generate {RUN} the --temperature -1", "Setting 'temperature' cannot be -1.0: input should be greater than or"),
    (f"generate {RUN} the --temperature nan", "Setting 'temperature' cannot be nan: input should be a finite number."),
    (f"generate {RUN} the --top-p 2", "Setting 'top_p' cannot be 2.0: input should be less than or equal to"),
    (f"generate {RUN} the --top-k 0", "Setting 'top_k' cannot be 0: input should be greater than or equal to"),
    (f"generate {RUN} the --mode bounden", "--mode is one of full, bounded, window; got 'bounden'. Did you mean"),
    (f"generate {RUN} the --mode window", "mode 'window' and a window go together; give both, such as mode"),
    (f"generate {RUN} the --mode window --window 0", "Setting 'window' cannot be 0: input should be greater than"),
    (f"generate {RUN} the --tolerance 2", "Setting 'tolerance' cannot be 2.0: input should be less than 1."),
    (f"generate {RUN} the --prompt-file text.txt", "give the prompt as an argument or by --prompt-file, not both."),
    (f"generate {RUN} --prompt-file nowhere.txt", "There is no file nowhere.txt. Give a text file in UTF-8."),
    (f"generate {RUN} the --interactive --samples 2", "at most one prompt, not from standard input, no --samples."),
    (f"generate {RUN} the --samples 0", "--samples must be at least 1, got 0."),
    (
        f"generate {RUN} the --tokenizer hf/config.json",
        "hf/config.json is not a tokenizer.json that the tokenizers library",
    ),
    (f"generate {RUN} the --chunk 0", "Setting 'chunk' cannot be 0: input should be greater than or equal to"),
    # report
    ("report", "RUN is missing: Run folders, or folders that hold some."),
    ("report nowhere", "There is no folder nowhere. Give run folders, or a folder that holds"),
    ("report empty", "There is nothing to report: no results in empty. Make some by"),
    ("report .", "There is nothing to report: no results in this folder. Make some by"),
    ("report text.txt", "There is no folder text.txt. Give run folders, or a folder that holds"),
    ("report runs --out /proc/foo", "The folder /proc/foo cannot be made: no such file or directory."),
    ("report runs --out text.txt", "text.txt is a file, and a folder was expected there. Choose another"),
    # reproduce, demo
    ("reproduce --scale laptops", "Unknown scale 'laptops'. Did you mean 'laptop'? Known: laptop, gpu,"),
    ("reproduce --only table55", "Unknown experiment 'table55'. Did you mean 'table5'? Known: demo,"),
    ("reproduce --only demo --methods alibbi", "Unknown position method 'alibbi'. Did you mean 'alibi'? Known: alibi,"),
    ("reproduce --only demo --seeds 0", "--seeds is a number from 1 to 9, got 0."),
    ("reproduce --only demo --jobs 0", "--jobs is the number of models at a time on this machine: at least 1,"),
    ("reproduce --only demo --launcher ssh", "Unknown launcher 'ssh'. Known: local, slurm."),
    (
        "reproduce --only demo --launcher slurm --site nowhere.toml",
        "The site file nowhere.toml: There is no file nowhere.toml. Write one",
    ),
    (
        "reproduce --only demo --launcher slurm --site text.txt",
        "The site file text.txt: Expected '=' after a key in a key/value pair",
    ),
    ("reproduce --only demo --out /proc/foo", "The folder /proc/foo cannot be made: no such file or directory."),
    (
        "reproduce --only demo --launcher slurm --site list.toml",
        "list.toml: Setting 'setup' cannot be 'module load x': in",
    ),
    (
        "reproduce --only demo --launcher slurm --site odd.toml",
        "odd.toml: Setting 'options.constraint' cannot be [1]: ",
    ),
    ("reproduce --only ,", "--only names nothing, got ',': Tables and figures by name, such as demo,table5"),
    ("reproduce --only demo --launcher slurm --site site.toml", "'partitoin'. Did you mean 'partition'?"),
    (
        "demo --report /proc/self/x",
        "The folder /proc/self/x cannot be made: no such file or directory. Choose another --r",
    ),
    ("reproduce --only ''", "--only names nothing, got '': Tables and figures by name, such as demo,table5"),
    ("reproduce table5", "'table5' is one word too many. See trainshort reproduce --help."),
    ("demo --methods rotery", "Unknown position method 'rotery'. Did you mean 'rotary'? Known:"),
    ("demo --methods ,", "--methods names nothing, got ',': Position methods in place of the paper's four"),
    ("demo --out ''", "--out is a path, got an empty word."),
    ("reproduce --only demo --methods ''", "--methods names nothing, got '': Position methods in place of"),
    ("demo --out text.txt", "text.txt is a file, and a folder was expected there. Choose another"),
    ("demo --report text.txt", "text.txt is a file, and a folder was expected there. Choose another"),
    ("demo now", "'now' is one word too many. See trainshort demo --help."),
    # bench, tune
    ("bench --quick", "trainshort bench needs a source checkout of trainshort."),
    ("tune --tokens 5", "trainshort tune needs a source checkout of trainshort."),
    # list, show
    ("list position", "Cannot list 'position'. Did you mean 'positions'? Choose: positions,"),
    ("list ''", "KIND is empty: positions, backends, corpora, tokenizers"),
    ("list positions backends", "'backends' is one word too many. See trainshort list --help."),
    ("list positions --plugin text.txt", "text.txt is no Python file. Give --plugin the path of a Python file."),
    ("show", "RECIPE is missing: Name of the recipe; `trainshort list recipes`"),
    ("show demo-alibbi", "Unknown recipe 'demo-alibbi'. Did you mean 'demo-alibi'? Known:"),
    ("show DEMO-ALIBI", "Unknown recipe 'DEMO-ALIBI'. Did you mean 'demo-alibi'?"),
    ("show runs/tinny", "Unknown recipe 'runs/tinny'. Known: demo-sinusoidal, demo-rotary,"),
    # import, export, verify
    ("import", "MODEL is missing: A fairseq checkpoint file, a Hugging Face model's"),
    ("import nowhere.pt --out runs/new", "There is no file or folder nowhere.pt, and the hub did not give a"),
    ("import text.txt --out runs/new", "text.txt is not a checkpoint of torch (it uses INST, which torch"),
    ("import hf --out runs/new", "hf is a model of type 'gpt2', with learned positions; trainshort convert"),
    ("import empty --out runs/new", "There is no file empty/config.json. Give the folder of a saved"),
    (f"import hf --out {RUN}", "hf is a model of type 'gpt2', with learned positions; trainshort convert"),
    ("import hf --out runs/new --trained-at 0", "--trained-at must be at least 1, got 0."),
    ("import hf --out runs/new --trained-at -4", "--trained-at must be at least 1, got -4."),
    ("import hf", "--out is missing: The run folder to make; refused if it exists."),
    (f"import {RUN} --out runs/new", "runs/tiny is a run folder of trainshort already. Use it as it is."),
    ("export", "RUN is missing: A run folder, or one of its checkpoints."),
    (f"export {RUN}", "--to is missing: hf-mpt, hf-bloom, hf, gguf or ctranslate2."),
    (f"export {RUN} --to gguff --out exported", "Unknown export target 'gguff'. Did you mean 'gguf'? Known: hf-mpt,"),
    (f"export {RUN} --to gguf --dtype q3 --out exported", "--to gguf writes f32, f16, q8_0, not 'q3'."),
    (f"export {RUN} --to hf --out link", "link is a link, and a new folder was expected there. Choose another --out."),
    (f"export {RUN} --to hf --out text.txt", "text.txt is a file, and a new folder was expected there. Choose"),
    ("export runs/tinny --to hf --out exported", "There is no run at 'runs/tinny'. Give a run folder, or one of the"),
    (f"export {RUN} --to hf --out /proc/foo", "The folder /proc/foo cannot be made: no such file or directory. Choose"),
    ("export hf --to gguf --out exported", "hf is a Hugging Face model. Bring it in first: trainshort import hf"),
    ("convert", "MODEL is missing: A Hugging Face model's folder, its name on the hub,"),
    ("convert hf --to alibi --out runs/new", "--data.corpus is missing: Text to train on: corpus name, file,"),
    ("convert hf --to rope --out runs/new --corpus text.txt", "--to is alibi, got 'rope': other positions are not"),
    ("convert hf --to alibi --out runs/new --corpus text.txt", "hf has no model.safetensors and no"),
    ("convert hf --to alibi --out runs/new --corpus text.txt --length 0", "--length must be at least 1, got 0."),
    (
        "convert hf --to alibi --out runs/new --corpus text.txt --max-tokens 0",
        "--max-tokens must be at least 1, got 0.",
    ),
    ("convert hf --to alibi --out runs/new --corpus sotuu", "'sotuu' is neither a known corpus nor a file or"),
    (f"convert hf --to alibi --out {RUN} --corpus text.txt", "runs/tiny already exists. Go on with it by --resume, or"),
    (
        f"convert {RUN} --to alibi --out runs/new --corpus text.txt",
        "runs/tiny has ALiBi already. Train it on as it is:",
    ),
    (
        f"convert hf --to alibi --out {RUN} --corpus text.txt --resume",
        "runs/tiny is a run, and no conversion that was stopped. Choose another --out.",
    ),
    (
        "convert empty --to alibi --out runs/new --corpus text.txt",
        "There is no run at 'empty'. Give a run folder, or one",
    ),
    (f"harness {RUN}", "--tasks is missing: Names of tasks, as lm_eval has them."),
    (f"harness {RUN} --tasks boook --include nowhere", "--include is a folder of task definitions (YAML); nowhere is"),
    (
        f"harness {RUN} --tasks boook --include text.txt --out new",
        "--include is a folder of task definitions (YAML); te",
    ),
    (f"harness {RUN} --tasks boook --limit 0", "--limit must be at least 1, got 0."),
    (f"harness {RUN} --tasks ,", "--tasks names nothing, got ',': Names of tasks, as lm_eval has them."),
    ("harness runs/tinny --tasks wikitext", "There is no run or model at 'runs/tinny'."),
    ("verify", "FOLDER is missing: A folder that trainshort export made."),
    ("verify nowhere", "There is no file nowhere/trainshort.json. Give a folder that"),
    ("verify empty", "There is no file empty/trainshort.json. Give a folder that trainshort"),
    (f"verify {RUN}", "There is no file runs/tiny/trainshort.json. Give a folder that"),
    ("verify text.txt", "There is no file text.txt/trainshort.json. Give a folder"),
    # doctor
    ("doctor", "MODEL is missing: The folder of a saved model, or its name on the hub."),
    ("doctor nowhere", "There is no file or folder nowhere, and the hub did not give a model"),
    ("doctor text.txt", "text.txt is a file; give the folder of a saved Hugging Face model, or"),
    ("doctor empty", "There is no file empty/config.json. Give the folder of a saved"),
    (f"doctor {RUN}", "runs/tiny is a run folder of trainshort; doctor examines models of"),
    ("doctor hf/untyped", "untyped/config.json says no model_type. Give the folder of a saved Hugging Face model."),
    (
        "import hf/untyped --out runs/new",
        "untyped/config.json says no model_type. Give the folder of a saved Hugging Face",
    ),
    ("doctor minus", "minus/config.json says that num_hidden_layers is -2. Mend it, or save the model anew."),
    ("doctor uneven", "uneven/config.json says that 5 heads share a width of 32. Mend it, or save the model anew."),
    ("doctor two", "transformers cannot read two/config.json (Validation error for field 'n_layers'"),
    ("doctor t5", "t5 is a model of type 't5', of which transformers has no causal language model; doctor examines"),
    ("doctor hf --jsn", "Unknown setting 'jsn'. Did you mean 'json'? See trainshort doctor"),
]


@pytest.fixture(scope="module")
def place(tiny_run, tmp_path_factory):
    """A newcomer's folder: a prepared text, a run, and what lies about."""
    folder = tmp_path_factory.mktemp("place") / "here"
    shutil.copytree(tiny_run, folder)
    (folder / "empty").mkdir()
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    (folder / "site.toml").write_text("partitoin = 'x'\n")
    (folder / "list.toml").write_text("setup = 'module load x'\n")
    (folder / "odd.toml").write_text("options = {constraint = [1]}\n")
    (folder / "link").symlink_to("nowhere")
    mpt = {"model_type": "mpt", "d_model": 32, "n_heads": 4}
    foreign = {"minus": mpt | {"n_layers": -2}, "uneven": mpt | {"n_heads": 5}, "two": mpt | {"n_layers": "two"}}
    for name, settings in (foreign | {"t5": {"model_type": "t5"}, "hf/untyped": {"n_layer": 1}}).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    (folder / "blank.txt").write_text(" \n\n\t\n" * 50)
    five = "from trainshort.data.corpora import corpora\n\n@corpora.register('five')\ndef five():\n    return 5\n"
    (folder / "five.py").write_text(five)
    (folder / "nothing.txt").touch()
    (folder / "number.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "latin.txt").write_bytes("café au lait".encode("latin-1"))
    (folder / "archive.zip").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    (folder / "odd.json").write_text('{"model": 5}')
    shutil.copytree(folder / RUN, folder / "runs" / "cut")
    os.truncate(folder / "runs" / "cut" / "checkpoints" / "step-000000008" / "model" / "whole.safetensors", 1000)
    (folder / "broken.py").write_text("import trainshort\n1 / 0\n")
    return folder


def written(folder: Path) -> dict[Path, int]:
    """Every file and its time, and every folder, but for the list of checksums that reading may write."""
    return {
        path: path.lstat().st_mtime_ns * path.is_file() for path in folder.rglob("*") if path.name != "checked.json"
    }


@pytest.mark.parametrize(("words", "part"), WRONG, ids=[words for words, _ in WRONG])
def test_it_is_exit_2_and_one_sentence_and_nothing_is_written(place, monkeypatch, capsys, words, part):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(place)
    monkeypatch.setattr(corpora, "_entries", dict(corpora._entries))  # a plug-in's is gone afterwards
    before = written(place)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    told = capsys.readouterr()
    assert ended.value.code == 2, told.err
    lines = [line for line in told.err.splitlines() if not line.startswith("usage: trainshort ")]
    assert len(lines) == 1, told.err
    assert lines[0].startswith("trainshort: ")
    assert lines[0].endswith((".", "?")), lines[0]
    assert part in lines[0]
    assert not re.search("Traceback|[\u2500-\u257f]", told.err)
    assert told.out == ""
    assert written(place) == before


def test_every_command_has_its_share():
    assert len(WRONG) >= 100
    assert {words.split()[0] for words, _ in WRONG} >= set(COMMANDS)
