// Report of a run: one HTML file with its charts, data and scripts embedded, so that it opens
// offline, and the same numbers as JSON and as text.
//
// Input files in the run's folder:
//   metrics.jsonl                    one object per step (step, loss, tokens_per_s, step_ms,
//                                    gemm_ms, compute_ms, exposed_comm_ms; optional:
//                                    validation_loss, lr, grad_norm, mfu; with experts aux_loss,
//                                    expert_imbalance, expert_rows); required
//   run.json                         title, command, date, prompt; heldout: files, bytes,
//                                    model_bits_per_byte, compressors [{name, bytes}]; link of
//                                    split/
//   sample.txt, samples.jsonl        generated text, any bytes; that of checkpoints: step, text
//   started.json                     command, date, hardware, version and commit of the training
//   trace.json                       trace of the run
//   receipts.json                    strategies that operators were asked for, and what ran
//   ranks/, config.toml              records of the ranks, and their layout
//   split/{serial,overlapped}/       metrics.jsonl and trace.json of short runs on one link
// Output files: report.html, summary.json.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "engine/report/run_goal.h"

namespace tandem {

/// Writes the report and returns the tables as plain text. A missing file omits its section, which
/// the report then names; an invalid one throws IoError naming the file and line. Throws IoError if
/// metrics.jsonl is missing. `read_goal`: for what config.toml says. `others`: folders of runs
/// whose curves and settings are compared with this one's; throws InvalidArgument as check_runs().
std::string write_report(const std::filesystem::path& dir, const report::GoalReader& read_goal = {},
                         std::span<const std::filesystem::path> others = {});

}  // namespace tandem
