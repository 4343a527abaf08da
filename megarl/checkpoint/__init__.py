"""Everything that a resume needs, saved sharded; Hugging Face import and export."""
