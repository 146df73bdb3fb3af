import sys

from dali_gguf.cli import main

sys.exit(main())
