#include "schedule/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "tandem/error.h"

namespace tandem::schedule {
namespace {

constexpr std::array<std::pair<PipelineKind, std::string_view>, 2> kNames{{
    {PipelineKind::gpipe, "gpipe"},
    {PipelineKind::one_f_one_b, "1f1b"},
}};

/// `ahead` forward passes, then backward and forward passes in turn.
std::vector<PipelineAction> alternate(int microbatches, int ahead) {
  std::vector<PipelineAction> actions;
  int forward = 0;
  for (int backward = 0; backward < microbatches; ++backward) {
    while (forward < std::min(microbatches, backward + ahead)) {
      actions.push_back({PassKind::forward, 0, forward++});
    }
    actions.push_back({PassKind::backward, 0, backward});
  }
  return actions;
}

}  // namespace

std::string_view name_of(PipelineKind kind) {
  for (const auto& [value, name] : kNames) {
    if (value == kind) return name;
  }
  return "";
}

PipelineKind parse_pipeline_kind(const std::string& name) {
  std::string known;
  for (const auto& [value, known_name] : kNames) {
    if (name == known_name) return value;
    known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", known_name);
  }
  throw ConfigError(fmt::format("schedule \"{}\": expected one of {}", name, known));
}

void check_pipeline(const PipelineShape& shape) {
  if (shape.ranks < 1 || shape.microbatches < 1 || shape.chunks < 1) {
    throw ConfigError(
        fmt::format("pipeline of {} ranks with {} stages each and {} microbatches: expected sizes "
                    "of at least 1",
                    shape.ranks, shape.chunks, shape.microbatches));
  }
  if (shape.chunks != 1) {
    throw ConfigError(fmt::format("schedule \"{}\" with {} stages per rank: expected 1",
                                  name_of(shape.kind), shape.chunks));
  }
}

int stage_of(const PipelineShape& shape, int rank, int chunk) {
  return chunk * shape.ranks + rank;
}

StagePlace place_of(const PipelineShape& shape, int stage) {
  return {stage % shape.ranks, stage / shape.ranks};
}

std::vector<PipelineAction> pipeline_actions(const PipelineShape& shape, int rank) {
  check_pipeline(shape);
  switch (shape.kind) {
    case PipelineKind::gpipe: return alternate(shape.microbatches, shape.microbatches);
    case PipelineKind::one_f_one_b: return alternate(shape.microbatches, shape.ranks - rank);
  }
  return {};
}

}  // namespace tandem::schedule
