"""DALI: where every expert's bytes lie and who computes it. Policies take counts and costs, and return ids."""
