"""Documents as Apache Parquet: the rows of the CSV, with types. It needs pyarrow."""

from longseq_bench.core.errors import UserError
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Document


@FORMATS.register("parquet")
def render(document: Document) -> Files:
    """`<stem>.parquet`. Raises UserError where pyarrow is missing."""
    import pandas

    names = [column.name for column in document.data.columns]
    rows = pandas.DataFrame(list(document.data.rows), columns=names).convert_dtypes()
    try:
        return {f"{document.stem}.parquet": rows.to_parquet(index=False)}
    except ImportError:
        raise UserError("--format parquet needs pyarrow: pip install pyarrow") from None
