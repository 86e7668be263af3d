"""Where bytes may lie, and how they are copied. No framework: memory is named by its address.

`device` is what the limit bounds. Below it are `host`, page-locked memory, and `file`, a file without a name in the
folder that `spill` chooses. Both are carved by `slab`, and `slots` counts who uses a place. `transfer` copies to the
file and back, one thread for each direction; `meter` measures the link meanwhile. `page_pool` keeps the pages of a
CPU's freed tensors. `capacity`, `resident`, `machine` and `disk` read what the kernel tells, with `proc`.
"""
