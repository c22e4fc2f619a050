"""The iterations of VFEM: messages, state, protocols and site steps."""
