"""Pages that commands write: one HTML file each, no network, light and dark, fit to print."""
