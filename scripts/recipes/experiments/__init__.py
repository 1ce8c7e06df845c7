"""What trainings are measured by: accuracy, throughput of loaders, epochs, profiles."""
