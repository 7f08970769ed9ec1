"""What people see of one run: rows, findings, and the document, terminal and report made of them.

::

    store_rows -> store_reader -> run_records -> summarise -> document | terminal | report_html

Only `store_rows` does I/O against a database and only `report` writes files; the rest is pure.
"""
