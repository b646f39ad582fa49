"""Checkpoints on the shared file system: staged, sealed, put in place, verified, pruned.

    {job_dir}/global_step_{version}/
      manifest.json    what is in the other folders, with sizes and sha256
      actor/           a Hugging Face folder that any tool can load, or an adapter in peft's format
      critic/          trainer_state/     what only the trainer reads; an older version is rid of most of it
      .weights-only    it is
    {job_dir}/.staging-{epoch}/           a checkpoint in the making
    {job_dir}/.garbage-*/                 what is being deleted

This is the only package that knows these names. A folder is visible under its name only when it is complete and on
disk; it is a version only when the ledger has registered it.

A trainer may stand still anywhere, and wake up when a newer one has taken over. So nothing is ever put in the place of
something else: a name that is taken is left alone, and the next free one is used (global_step_7-1). A name is free
again only once its version is registered, and then nobody wants it. A newer trainer moves the stagings of older epochs
away, in one step, and with them their way to a name.
"""
