#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "fit/methods/rows.h"
#include "tandem/error.h"

namespace tandem::fit {

const OptionRow kPOption{"--p", [](const FitOptions& o) { return o.p.has_value(); }};
const OptionRow kStepOption{"--step", [](const FitOptions& o) { return o.step.has_value(); }};
const OptionRow kSparsityOption{"--sparsity",
                                [](const FitOptions& o) { return o.sparsity.has_value(); }};
const OptionRow kCohortOption{"--cohort", [](const FitOptions& o) { return o.cohort.has_value(); }};
const OptionRow kGraphOption{"--graph", [](const FitOptions& o) { return o.graph.has_value(); }};
const OptionRow kCodecOption{"--codec", [](const FitOptions& o) { return o.codec.has_value(); }};
const OptionRow kTokensOption{"--tokens", [](const FitOptions& o) { return o.tokens.has_value(); }};
const OptionRow kTauOption{"--tau", [](const FitOptions& o) { return o.tau.has_value(); }};
const OptionRow kAsyncOption{"--async", [](const FitOptions& o) { return o.async; }};
const OptionRow kFailOption{"--fail", [](const FitOptions& o) { return !o.failures.empty(); }};

namespace {

const OptionRow* const kOptions[] = {&kPOption,     &kStepOption,  &kSparsityOption, &kCohortOption,
                                     &kGraphOption, &kCodecOption, &kTokensOption,   &kTauOption,
                                     &kAsyncOption, &kFailOption};

std::string names_of(const std::vector<const OptionRow*>& options) {
  std::vector<std::string> names;
  for (const OptionRow* option : options) names.emplace_back(option->name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::span<const MethodRow> methods() {
  static const MethodRow rows[] = {gd_row(),     scaffnew_row(), compressed_scaffnew_row(),
                                   tamuna_row(), proxcsl_row(),  average_row(),
                                   gossip_row(), api_bcd_row()};
  return rows;
}

const MethodRow& find_method(const std::string& name) {
  std::vector<std::string> names;
  for (const MethodRow& row : methods()) {
    if (name == row.name) return row;
    names.emplace_back(row.name);
  }
  throw InvalidArgument(
      fmt::format("--method {}: expected one of {}", printable(name), fmt::join(names, ", ")));
}

void check_options(std::span<const MethodRow* const> rows, const FitOptions& options) {
  for (const OptionRow* option : kOptions) {
    const auto reads = [&](const MethodRow* row) {
      return std::find(row->reads.begin(), row->reads.end(), option) != row->reads.end();
    };
    if (!option->is_given(options) || std::any_of(rows.begin(), rows.end(), reads)) continue;
    throw InvalidArgument(fmt::format("{}: {} does not read it, but {}", option->name,
                                      rows.front()->name, names_of(rows.front()->reads)));
  }
  for (const MethodRow* row : rows) {
    if (options.l1 > 0 && !row->takes_l1)
      throw InvalidArgument(fmt::format("--l1 {:g}: {} takes --l2 only", options.l1, row->name));
  }
  for (const Failure& failure : options.failures) {
    if (failure.client >= options.clients) {
      throw InvalidArgument(fmt::format("--fail {}@{}: {} clients: expected 0 to {}",
                                        failure.client, failure.first, options.clients,
                                        options.clients - 1));
    }
  }
  for (const MethodRow* row : rows) {
    if (row->check) row->check(options);
  }
}

}  // namespace tandem::fit
