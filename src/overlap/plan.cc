#include "overlap/plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace tandem {

std::string_view name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::automatic:
      return "automatic";
    case Strategy::serial:
      return "serial";
    case Strategy::overlapped:
      return "overlapped";
  }
  return "?";
}

std::string describe(const Plan& plan) {
  return fmt::format("{}, {} chunk{}{}", name_of(plan.strategy()), plan.chunks,
                     plan.chunks == 1 ? "" : "s", plan.one_shot ? ", one-shot" : "");
}

int default_chunks(int64_t rows) {
  int chunks = 1;
  while (chunks < 4 && rows >> chunks >= 32) ++chunks;
  return chunks;
}

std::vector<int> chunk_counts(int64_t rows) {
  std::vector<int> counts;
  for (const int chunks : {1, 2, 3, 5}) {
    if (chunks == 1 || rows >> (chunks - 1) >= 16) counts.push_back(chunks);
  }
  return counts;
}

std::vector<Plan> candidates(const OverlapOptions& options, int64_t rows) {
  std::vector<Plan> plans{{false, 1}};
  if (options.chunks) {
    plans.push_back({true, options.chunks});
    return plans;
  }
  for (const int chunks : chunk_counts(rows)) plans.push_back({true, chunks});
  return plans;
}

Plan fixed_plan(std::string_view op, const OverlapOptions& options, int64_t rows) {
  if (options.chunks < 0 || options.chunks > kMaxChunks) {
    throw InvalidArgument(
        fmt::format("{}: chunks {}: expected 0 (chosen) to {}", op, options.chunks, kMaxChunks));
  }
  if (options.strategy == Strategy::serial) return {false, 1};
  return {true, options.chunks ? options.chunks : default_chunks(rows)};
}

}  // namespace tandem
