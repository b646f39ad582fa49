"""Checkpoints on the shared file system: staged, sealed, put in place, verified, pruned.

    {job_dir}/global_step_{version}/
      manifest.json    the weights' files, with sizes and sha256; its own sha256 is registered
      actor/           a Hugging Face folder that any tool can load, or an adapter in peft's format
      trainer_state/   counters and the random generator
      state_manifest.json   critic/ and the optimisers in trainer_state/, which come after the version is registered
      .weights-only    they are deleted, or about to be
    {job_dir}/.staging-{epoch}/           a version's weights in the making
    {job_dir}/.staging-{epoch}-state/     its critic and optimisers in the making
    {job_dir}/.garbage-*/                 what is being deleted

This is the only package that knows these names. A folder is visible under its name only when it is complete and on
disk; it is a version only when the ledger has registered it.

A trainer may stand still anywhere, and wake up when a newer one has taken over. So nothing is ever put in the place of
something else: a name that is taken is left alone, and the next free one is used (global_step_7-1). A name is free
again only once its version is registered, and then nobody wants it. A newer trainer moves the stagings of older epochs
away, in one step, and with them their way to a name.
"""
