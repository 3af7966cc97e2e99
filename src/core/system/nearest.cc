#include "core/system/nearest.h"

#include <algorithm>
#include <vector>

namespace tandem {

int edit_distance(std::string_view a, std::string_view b) {
  const size_t n = b.size() + 1;
  std::vector<int> before(n), last(n), row(n);
  for (size_t j = 0; j < n; ++j) last[j] = int(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = int(i);
    for (size_t j = 1; j < n; ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string nearest(std::string_view typed, std::span<const std::string> known) {
  std::string best;
  int fewest = 0;
  for (const std::string& name : known) {
    const auto [shorter, longer] = std::minmax({typed.size(), name.size()});
    const size_t maximum = std::max<size_t>(1, longer / 3);
    const bool prefix = typed.size() >= 3 && std::string_view(name).starts_with(typed);
    if (longer - shorter > maximum && !prefix) continue;  // at least that many insertions
    const int distance = edit_distance(typed, name), allowed = int(maximum);
    if ((distance <= allowed || prefix) && (best.empty() || distance < fewest)) {
      best = name;
      fewest = distance;
    }
  }
  return best;
}

}  // namespace tandem
