// What a report shows beside the training itself, and is measured for it: held-out text against
// compressors, a sample, and the time of a step with communication exposed and hidden.
#pragma once

#include <filesystem>
#include <string>

namespace tandem::cli {

struct ReportPartsOptions {
  std::string link = "400MB/s,30us";  ///< emulated, for the step times
  std::string prompt;                 ///< of the sample
};

/// Measures what `dir` lacks of them and writes run.json, compared.txt, eval.json, sample.txt and
/// split/. Only what the run has the means for: without final/ no text is scored, and one rank
/// sends nothing.
void measure_report_parts(const std::filesystem::path& dir, const ReportPartsOptions& options);

}  // namespace tandem::cli
