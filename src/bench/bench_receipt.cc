#include "bench/bench_receipt.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/system/lines.h"
#include "tune/margin.h"

namespace tandem {
namespace {

struct Measured {
  std::vector<NamedForm> forms;
  std::vector<double> us;
  /// The fastest of a form; forms.size() if there is none.
  size_t fastest(Strategy form) const {
    size_t best = forms.size();
    for (size_t i = 0; i < forms.size(); ++i) {
      if (forms[i].form == form && (best == forms.size() || us[i] < us[best])) best = i;
    }
    return best;
  }
};

std::string shape_of(const BenchRequest& q) {
  return fmt::format("m {} n {} k {} {}{}{}", q.m, q.n, q.k, name_of(q.dtype),
                     q.add_norm ? " add_norm" : "",
                     q.wire.is_none() ? "" : " as " + q.wire.describe());
}

}  // namespace

Receipt choose_receipt(const BenchRequest& q, const BenchResult& result, int ranks) {
  Receipt receipt{
      .op = q.op, .shape = shape_of(q), .dtype = std::string(name_of(q.dtype)), .group = ranks};
  Measured measured;
  for (const auto& [name, candidate] : result.candidates) {
    if (name == kUnfused) continue;
    measured.forms.push_back({name, candidate.form});
    measured.us.push_back(candidate.times.median_us);
  }
  const size_t none = measured.forms.size(), serial = measured.fastest(Strategy::serial),
               overlapped = measured.fastest(Strategy::overlapped);
  const bool overlaps = overlapped != none &&
                        (serial == none || measured.us[overlapped] <
                                               (1 - kOverSerial.over_first) * measured.us[serial]);
  record_choice(receipt, measured.forms, measured.us, overlaps ? overlapped : serial,
                result.refusals);
  return receipt;
}

std::string receipt_lines(const std::vector<Receipt>& receipts, size_t columns) {
  std::string text;
  for (const Receipt& each : receipts) {
    if (each.group == 1 || each.ran_as_asked()) continue;
    std::string line = "   ";
    for (const auto& word : words_of(describe(each, each.calls > 0 ? "ran" : "would run"))) {
      if (line.size() + 1 + word.size() > columns) {
        text += line + "\n";
        line = "     ";
      }
      line += " " + word;
    }
    text += line + "\n";
  }
  return text;
}

}  // namespace tandem
