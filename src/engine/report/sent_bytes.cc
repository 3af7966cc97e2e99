#include "engine/report/sent_bytes.h"

#include <cmath>

namespace tandem::report {
namespace {

struct SentKey {
  const char *key, *axis;
};
constexpr SentKey kSentKeys[] = {{"tp_bytes", "tp"},
                                 {"expert_bytes", "ep"},
                                 {"gradient_bytes", "dp"},
                                 {"weight_bytes", "dp"},
                                 {"stage_bytes", "pp"}};

}  // namespace

void SentBytes::set(const nlohmann::ordered_json& row) {
  bytes_.clear();
  for (const auto& [key, axis] : kSentKeys) {
    if (row.contains(key) && row[key].is_number()) bytes_[axis] += row[key].get<double>();
  }
}

nlohmann::ordered_json SentBytes::json(size_t ranks) const {
  nlohmann::ordered_json sent;
  for (const char* axis : {"tp", "ep", "dp", "pp"}) {
    const auto found = bytes_.find(axis);
    sent[axis] = found == bytes_.end() || ranks == 0
                     ? nlohmann::ordered_json()
                     : nlohmann::ordered_json(std::round(found->second / double(ranks)));
  }
  return sent;
}

}  // namespace tandem::report
