"""Who may do what: TLS, tokens and scopes, request rates; the server's side and the readers' side."""
