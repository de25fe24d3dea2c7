"""Data of a training run: slices and their manifest, and which member trains on which samples.

    manifest    what a data set consists of; pure
    evaluating  which held-out samples are evaluated on; pure
    dealing     each sample of an epoch is used exactly once; pure, with `epoch` and `spans`
    slices      a data directory, and the tensors of a slice
    slice_file  the file of a slice as a blob
    own_slices  slices that a member has on its own disk
    web         a data directory behind a web server
    blobs       slices between peers: served, fetched, kept
    handing_on  what a member gives of them, a few at a time
    takers      who took which slice, and may have it
    preparing   from text or images to a data directory

Nothing is imported here: which member has what is known without torch.
"""
