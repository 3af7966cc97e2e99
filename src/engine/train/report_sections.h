// Parts of a report in addition to the training, measured for it: held-out text against
// compressors, a sample, and step times with communication exposed and hidden.
#pragma once

#include <filesystem>
#include <string>

namespace tandem {

struct ReportSectionsOptions {
  std::string
      link;  ///< emulated, for the step times; empty: chosen (engine/report/trace/step_pairs.h)
  std::string prompt;  ///< for the sample
};

/// Measures the sections missing in `dir` and writes run.json, compared.txt, eval.json, sample.txt,
/// samples.jsonl (of kept checkpoints, if there are several) and split/. Skips sections that the
/// run cannot provide: no text is scored without final/, and no steps are timed for one rank.
void measure_report_sections(const std::filesystem::path& dir,
                             const ReportSectionsOptions& options);

}  // namespace tandem
