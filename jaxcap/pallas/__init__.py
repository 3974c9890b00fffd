"""Backend `pallas`: attention kernels in Pallas Mosaic GPU for Hopper (sm90)."""
