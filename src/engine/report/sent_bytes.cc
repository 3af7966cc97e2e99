#include "engine/report/sent_bytes.h"

#include <cmath>

namespace tandem::report {
namespace {

struct SentKey {
  const char *key, *axis;
};
/// Keys of files of earlier versions, which have no "sent_bytes".
constexpr SentKey kSentKeys[] = {{"tp_bytes", "tp"},
                                 {"expert_bytes", "ep"},
                                 {"gradient_bytes", "dp"},
                                 {"weight_bytes", "dp"},
                                 {"stage_bytes", "pp"}};

}  // namespace

void SentBytes::set(const nlohmann::ordered_json& row) {
  const auto exchanged = bytes_.extract("sync");
  bytes_.clear();
  is_mean_ = row.contains("sent_bytes") && row["sent_bytes"].is_object();
  if (is_mean_) {
    for (const auto& [axis, bytes] : row["sent_bytes"].items()) {
      if (bytes.is_number() && bytes.get<double>() > 0) bytes_[axis] = bytes.get<double>();
    }
    const bool has_sync = row["sent_bytes"].contains("sync");
    if (has_sync && !exchanged.empty()) bytes_.try_emplace("sync", exchanged.mapped());
    return;
  }
  for (const auto& [key, axis] : kSentKeys) {
    if (row.contains(key) && row[key].is_number()) bytes_[axis] += row[key].get<double>();
  }
}

nlohmann::ordered_json SentBytes::json(size_t ranks) const {
  nlohmann::ordered_json sent;
  for (const char* axis : {"tp", "ep", "dp", "pp", "cp", "sync"}) {
    const auto found = bytes_.find(axis);
    const double divisor = is_mean_ ? 1 : double(ranks);
    sent[axis] = found == bytes_.end() || ranks == 0
                     ? nlohmann::ordered_json()
                     : nlohmann::ordered_json(std::round(found->second / divisor));
  }
  return sent;
}

}  // namespace tandem::report
