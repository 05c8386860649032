"""What drives the engines and judges them; imports only plain types from services, never vllm or torch."""
