"""What institutions learn of each other's columns before each predicts by itself (VFedTrans)."""
