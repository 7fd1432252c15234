"""All compiled code: C sources, and the one way to build and load them (`build.load`).

shared/     vector.h  eight floats at a time               pool.h, pool.c  work for several threads

attention/  windowed.c  entry points, called by attention/operator.py
            call.h      what a call is given              centres.h   vectors that keys lie close to
            tile.h      the three matrix products         bound.h     what far keys can weigh at most
            panel.h     query rows in lanes               forward.h   nearest block first, stop when the bound says so
            decode.h    a few rows against a long past    backward.h  the same blocks again

decode/     ring.c  one token against the rings of a bounded cache, called by cache/ring.py
            step.c  one row through a linear layer, one token through all layers
"""
