#include "engine/train/checks/fault_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include "core/system/lines.h"
#include "core/system/printable.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr std::array<std::string_view, 15> kFaultNames{
    "kill",         "hang",         "pause",          "slow",         "flip_weights",
    "flip_masters", "flip_moments", "flip_gradients", "flip_message", "flip_checkpoint",
    "no_space",     "io_error",     "clock",          "slow_link",    "late_message"};
constexpr uint64_t kRankStream = 1, kRandomStream = 2;

/// Readers of one table of a file of faults.
struct FaultTable {
  const toml::table& table;
  const std::string& file;
  std::string path;  ///< of the table, before its keys' names

  std::string at(const toml::node& node) const {
    return fmt::format("{}:{}", file, node.source().begin.line);
  }
  [[noreturn]] void wrong(std::string_view key, const toml::node& node,
                          const std::string& expected) const {
    std::string value = "of type " + printed(node.type());
    node.visit([&](const auto& of_type) {
      if constexpr (toml::is_value<decltype(of_type)>) value = printed(of_type.get());
    });
    throw ConfigError(fmt::format("{}: {}{} is {}: expected {}", at(node), path, key,
                                  printable(value), expected));
  }
  double number(std::string_view key, double otherwise, double min, double max) const {
    const toml::node* const node = table.get(key);
    if (!node) return otherwise;
    const auto value = node->is_number() ? node->value<double>() : std::nullopt;
    if (value && *value >= min && *value <= max) return *value;
    wrong(key, *node, fmt::format("a number from {:.7g} to {:.7g}", min, max));
  }
  int64_t integer(std::string_view key, int64_t otherwise, int64_t min, int64_t max) const {
    const toml::node* const node = table.get(key);
    if (!node) return otherwise;
    const auto* const value = node->as_integer();
    if (value && value->get() >= min && value->get() <= max) return value->get();
    wrong(key, *node, fmt::format("an integer from {} to {}", min, max));
  }
  std::string pattern(std::string_view key, const std::string& otherwise,
                      const char* expected) const {
    const toml::node* const node = table.get(key);
    if (!node) return otherwise;
    if (const auto* const value = node->as_string()) return value->get();
    wrong(key, *node, expected);
  }
  FaultKind kind(std::string_view key, const toml::node& node) const {
    const auto* const value = node.as_string();
    const auto found = std::ranges::find(kFaultNames, value ? value->get() : std::string());
    if (found != kFaultNames.end()) return FaultKind(found - kFaultNames.begin());
    wrong(key, node, fmt::format("one of {}", fmt::join(kFaultNames, ", ")));
  }
  /// A phase in which the fault may happen: of a kill any, else of computation.
  Phase phase(std::string_view key, const toml::node& node, FaultKind kind) const {
    std::vector<Phase> phases{Phase::forward, Phase::backward, Phase::weight_gradients,
                              Phase::update};
    if (kind == FaultKind::kill) {
      phases.resize(kPhases);
      for (size_t i = 0; i < kPhases; ++i) phases[i] = Phase(i);
    }
    const auto* const value = node.as_string();
    const auto to_name = [](Phase p) { return name_of(p); };
    const auto found = std::ranges::find(phases, value ? value->get() : std::string(), to_name);
    if (found != phases.end()) return *found;
    std::vector<std::string_view> names;
    std::ranges::transform(phases, std::back_inserter(names), to_name);
    wrong(key, node, fmt::format("one of {}", fmt::join(names, ", ")));
  }
  void check_keys(std::initializer_list<std::string_view> known) const {
    for (const auto& [key, node] : table) {
      if (std::ranges::find(known, key.str()) != known.end()) continue;
      throw ConfigError(fmt::format("{}: unknown key '{}{}': expected one of {}", at(node), path,
                                    printable(key.str()), fmt::join(known, ", ")));
    }
  }
};

Fault parse_fault(const FaultTable& in, int ranks) {
  in.check_keys({"step", "rank", "kind", "tensor", "file", "bit", "percent", "phase", "span",
                 "seconds", "ppm", "peer"});
  for (const std::string_view key : {"step", "kind"}) {
    if (in.table.contains(key)) continue;
    throw ConfigError(fmt::format("{}: {}{} is missing", in.at(in.table), in.path, key));
  }
  constexpr int64_t kMaxStep = int64_t{1} << 50;
  Fault fault{.step = in.integer("step", 0, 1, kMaxStep),
              .rank = int(in.integer("rank", -1, 0, ranks - 1)),
              .kind = in.kind("kind", *in.table.get("kind"))};
  fault.bit = int(in.integer("bit", -1, 0, 31));
  fault.percent = in.number("percent", fault.percent, 0, 1e6);
  if (const toml::node* const node = in.table.get("phase")) {
    fault.phase = in.phase("phase", *node, fault.kind);
  }
  fault.span = in.pattern("span", fault.span, "a name of spans");
  const bool is_clock = fault.kind == FaultKind::clock;
  fault.seconds = in.number("seconds", is_clock ? 0 : fault.seconds, is_clock ? -1e6 : 0, 1e6);
  fault.ppm = in.number("ppm", fault.ppm, -1e5, 1e5);
  fault.peer = int(in.integer("peer", fault.peer, 0, ranks - 1));
  fault.tensor = in.pattern("tensor", fault.tensor, "a pattern of tensors' names");
  fault.file = in.pattern("file", fault.file, "a pattern of paths");
  return fault;
}

}  // namespace

bool FaultPlan::has(FaultKind kind) const {
  return std::ranges::find(faults_, kind, &Fault::kind) != faults_.end() ||
         (rate_ > 0 && std::ranges::find(kinds_, kind) != kinds_.end());
}

std::string_view name_of(FaultKind kind) {
  return kFaultNames[size_t(kind)];
}

FaultPlan::FaultPlan(const std::string& text, const std::string& file, int ranks)
    : text_(text), ranks_(ranks) {
  toml::table root;
  try {
    root = toml::parse(std::string_view(text), file);
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: not valid TOML: {}", file, error.source().begin.line,
                                  printable(error.description(), 300)));
  }
  const FaultTable top{root, file, ""};
  top.check_keys({"seed", "fault", "random"});
  seed_ = uint64_t(top.integer("seed", 1, 0, int64_t{1} << 50));
  if (const toml::node* const node = root.get("fault")) {
    if (!node->is_array_of_tables()) top.wrong("fault", *node, "tables [[fault]]");
    for (const toml::node& each : *node->as_array()) {
      faults_.push_back(parse_fault({*each.as_table(), file, "fault."}, ranks));
      faults_.back().number = faults_.size();
      if (faults_.back().rank >= 0) continue;
      faults_.back().rank = int(philox(seed_, kRankStream, faults_.size())[0] % uint32_t(ranks));
    }
  }
  const toml::node* const node = root.get("random");
  if (!node) return;
  if (!node->is_table()) top.wrong("random", *node, "a table");
  const FaultTable random{*node->as_table(), file, "random."};
  random.check_keys({"rate", "kinds"});
  rate_ = random.number("rate", 0, 0, 1);
  const toml::node* const kinds = random.table.get("kinds");
  if (!kinds || !kinds->is_array() || kinds->as_array()->empty()) {
    if (kinds) random.wrong("kinds", *kinds, "an array of kinds of faults");
    throw ConfigError(fmt::format("{}: random.kinds is missing", random.at(*node)));
  }
  for (const toml::node& kind : *kinds->as_array()) kinds_.push_back(random.kind("kinds", kind));
}

std::vector<Fault> FaultPlan::at(int64_t step) const {
  std::vector<Fault> found;
  for (const Fault& fault : faults_) {
    if (fault.step == step) found.push_back(fault);
  }
  if (rate_ == 0) return found;
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint64_t index = uint64_t(step) * uint64_t(ranks_) + uint64_t(rank);
    const auto words = philox(seed_, kRandomStream, index);
    if (double(words[0]) * 0x1p-32 >= rate_) continue;
    found.push_back({.step = step,
                     .rank = rank,
                     .kind = kinds_[words[1] % kinds_.size()],
                     .number = (uint64_t{1} << 40) + index});
  }
  return found;
}

}  // namespace tandem
