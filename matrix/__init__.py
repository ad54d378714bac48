"""The version matrix: where hepatch holds, measured on pairs of real releases of DeepSpeed and transformers."""
