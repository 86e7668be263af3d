"""`ddlrun bench`: how fast are the collectives here, beside their bound and beside other libraries' in the same run."""
