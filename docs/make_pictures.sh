#!/usr/bin/env bash
# Makes docs/report.png (a run with a known fault, and the top of its report in a headless browser) and docs/page.png.
# Needs Debian's chromium (or another Chromium as $CHROMIUM).
set -euo pipefail
cd "$(dirname "$0")/.."
run=$(mktemp -d)/slow-expert
.venv/bin/moetrace demo --inject rank=2,phase=expert_gemm,delay_ms=60,layer=1 --dir "$run"
"${CHROMIUM:-chromium}" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
  --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$(mktemp -d)" \
  --window-size=1280,1460 --screenshot=docs/report.png "file://$run/report.html"
.venv/bin/python docs/page_picture.py
