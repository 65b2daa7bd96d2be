"""The doors (REST, gRPC, OpenAI, console) and the data plane behind them."""
