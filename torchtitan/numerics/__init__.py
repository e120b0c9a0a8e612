"""Matrix products and normalisation of models, faster on CPUs than torch's own."""
