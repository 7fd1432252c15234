"""The C kernels, and the functions that build and load them (`build.load`).

common/     simd.h          vectors of eight floats, and functions on them
            thread_pool.h   distributes the items of a work queue over several threads (thread_pool.c)

windowed/   windowed.c      the functions that attention/backends/ctypes_call.py calls
            args.h          the arguments of a call
            matmul.h        the matrix products
            query_tile.h    groups of query rows that are processed together
            centroids.h     clusters of keys
            bound.h         upper bounds on the softmax mass of distant keys
            forward.h       the forward pass
            backward.h      the backward pass
            decode.h        the forward pass for a few queries and many keys

decode/     ring_buffer.c   the attention of one token to the ring buffers of a KV cache (model/cache/ring_buffer.py)
            layers.c        one token through a linear layer or all layers (generate/fast_decode.py)
"""
