"""Files and commands that start a job on several machines, for `torchtitan launch`."""
