"""Jobs on several machines, written out for the engines that start them: `torchtitan launch`."""
