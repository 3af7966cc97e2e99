#include "tune/candidate.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {
namespace {

int default_chunks(int64_t rows) {
  int chunks = 1;
  while (chunks < 4 && rows >> chunks >= 32) ++chunks;
  return chunks;
}

}  // namespace

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

std::vector<Candidate> chunked_candidates(
    const std::vector<int>& chunk_counts,
    const std::function<void(Strategy, int, const Operands&)>& run) {
  std::vector<Candidate> all;
  const auto add = [&](Strategy form, int chunks) {
    all.push_back(
        {.name = fmt::format("{}, {} chunk{}", name_of(form), chunks, chunks == 1 ? "" : "s"),
         .form = form,
         .run = [=](const Operands& operands) { run(form, chunks, operands); },
         .chunks = chunks});
  };
  add(Strategy::serial, 1);
  for (const int chunks : chunk_counts) add(Strategy::overlapped, chunks);
  return all;
}

std::vector<int> chunk_counts(int64_t rows) {
  std::vector<int> counts;
  for (const int chunks : {1, 2, 3, 5}) {
    if (chunks == 1 || rows >> (chunks - 1) >= 16) counts.push_back(chunks);
  }
  return counts;
}

std::vector<int> chunk_counts(std::string_view op, const OverlapOptions& options, int64_t rows) {
  if (options.chunks < 0 || options.chunks > kMaxChunks) {
    throw InvalidArgument(
        fmt::format("{}: chunks {}: expected 0 (chosen) to {}", op, options.chunks, kMaxChunks));
  }
  if (options.strategy == Strategy::serial) return {};
  if (options.chunks) return {options.chunks};
  if (options.strategy == Strategy::overlapped) return {default_chunks(rows)};
  return chunk_counts(rows);
}

}  // namespace tandem
