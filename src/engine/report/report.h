// The report of a run: one HTML file with its charts, data and scripts inside, so that it opens
// offline, and the same numbers as JSON and as text.
//
// Read from the run's folder:
//   metrics.jsonl                    one object a step (step, loss, tokens_per_s, step_ms, gemm_ms,
//                                    compute_ms, exposed_comm_ms; validation_loss, lr, grad_norm,
//                                    mfu where they are; with experts
//                                    imbalance and aux_loss); required
//   run.json                         title, command, date, prompt; heldout: files, bytes,
//                                    model_bits_per_byte, compressors [{name, bytes}]; link of
//                                    split/
//   sample.txt                       generated text, any bytes
//   trace.json                       of the run
//   split/{serial,overlapped}/       metrics.jsonl and trace.json of short runs on one link
// Written to it: report.html, summary.json.
#pragma once

#include <filesystem>
#include <string>

namespace tandem {

/// Writes the report and returns the tables as plain text. A file that is missing leaves out its
/// section, which the report then names; one that is there but wrong throws IoError naming the file
/// and line. Throws IoError when metrics.jsonl is missing.
std::string write_report(const std::filesystem::path& dir);

}  // namespace tandem
