"""What a run tells: metrics, TensorBoard, the console line, pictures, records."""
