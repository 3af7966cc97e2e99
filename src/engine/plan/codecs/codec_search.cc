#include "engine/plan/codecs/codec_search.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/system/machine.h"
#include "core/system/process/command_line.h"
#include "core/version.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void set(const CodecSite& site, const Wire& wire, CodecPolicy& policy) {
  for (Wire CodecPolicy::*member : site.wires) policy.*member = wire;
}

/// One format at one site, measured separately.
struct Option {
  Wire wire;
  double cost = 0;   ///< absolute change of the loss
  double bytes = 0;  ///< bytes sent
};

class Search {
 public:
  Search(const SentBytes& sent, double budget,
         const std::function<double(const CodecPolicy&)>& bits_per_byte)
      : sent_(sent), sites_(codec_sites(sent.model)), measured_(bits_per_byte) {
    choice_.budget = budget;
    trial({}, "");
  }

  CodecChoice run(std::span<const Wire> formats) {
    for (const CodecSite& site : sites_) {
      options_.push_back({{Wire{}, 0, sent_.of(site, {})}});
      for (const Wire& wire : formats) {
        if (choice_.budget == 0 && !wire.is_exact()) continue;
        CodecPolicy alone;
        set(site, wire, alone);
        const CodecTrial& tried = choice_.trials[trial(alone, site.name)];
        options_.back().push_back({wire, std::fabs(tried.rise), sent_.of(site, wire)});
      }
    }
    double allowed = choice_.budget;
    while (true) {
      const auto [policy, cost] = combination(allowed);
      choice_.chosen = trial(policy, "");
      const double rise = choice_.best().rise;
      if (rise <= choice_.budget) return choice_;
      if (cost == 0) {  // no format left to remove
        choice_.chosen = 0;
        return choice_;
      }
      // Reduces the limit by the ratio of the excess, at least by a twentieth.
      allowed = cost * std::clamp(choice_.budget / rise, 0.5, 0.95);
    }
  }

 private:
  /// Index of the policy's trial; measures it if new.
  size_t trial(const CodecPolicy& policy, const std::string& site) {
    auto& trials = choice_.trials;
    const auto known = std::ranges::find(trials, policy, &CodecTrial::policy);
    if (known != trials.end()) return size_t(known - trials.begin());
    const double bits = measured_(policy);
    const double rise = trials.empty() ? 0 : bits / trials.front().bits_per_byte - 1;
    // The loss is 0 without text, and may be NaN for a damaged model.
    if (!std::isfinite(rise) || bits <= 0) {
      throw InvalidArgument(fmt::format("codec '{}': {} bits per byte: expected a loss above 0",
                                        policy.describe(), bits));
    }
    trials.push_back({policy, site, bits, rise, sent_.of(policy)});
    return trials.size() - 1;
  }

  /// Candidate change: a site's format replaced by one that sends less.
  struct Change {
    size_t site, option;
    double saved, cost;
    /// Orders by bytes saved per rise; changes without cost by bytes.
    bool operator<(const Change& other) const {
      const double a = saved * std::max(other.cost, 0.0), b = other.saved * std::max(cost, 0.0);
      return a != b ? a < b : saved < other.saved;
    }
  };

  std::pair<CodecPolicy, double> combination(double allowed) const {
    std::vector<size_t> taken(sites_.size(), 0);
    double cost = 0;
    while (const std::optional<Change> change = best_change(taken, allowed - cost)) {
      taken[change->site] = change->option;
      cost += change->cost;
    }
    CodecPolicy policy;
    for (size_t i = 0; i < sites_.size(); ++i) set(sites_[i], options_[i][taken[i]].wire, policy);
    return {policy, cost};
  }

  std::optional<Change> best_change(const std::vector<size_t>& taken, double left) const {
    std::optional<Change> best;
    for (size_t site = 0; site < sites_.size(); ++site) {
      const Option& now = options_[site][taken[site]];
      for (size_t i = 0; i < options_[site].size(); ++i) {
        const Option& other = options_[site][i];
        const Change change{site, i, now.bytes - other.bytes, other.cost - now.cost};
        if (change.saved <= 0 || change.cost > left) continue;
        if (!best || *best < change) best = change;
      }
    }
    return best;
  }

  const SentBytes& sent_;
  const std::vector<CodecSite> sites_;
  const std::function<double(const CodecPolicy&)>& measured_;
  std::vector<std::vector<Option>> options_;  ///< by site; the first is uncompressed
  CodecChoice choice_;
};

}  // namespace

std::vector<CodecSite> codec_sites(const ModelConfig& c) {
  std::vector<CodecSite> sites;
  const auto add = [&](std::string name, std::vector<Wire CodecPolicy::*> wires, int64_t rows) {
    if (rows > 0) sites.push_back({std::move(name), std::move(wires), rows});
  };
  const int64_t mlps = c.shared_ffn > 0 ? c.layers : c.layers - c.moe_layers();
  if (c.parallel_block) {
    add("block", {&CodecPolicy::attention, &CodecPolicy::mlp}, c.layers);
  } else {
    add("attention", {&CodecPolicy::attention}, c.layers);
    add("mlp", {&CodecPolicy::mlp}, mlps);
  }
  add("experts", {&CodecPolicy::experts}, 2 * c.moe_layers());  // dispatch and combine
  add("embeddings", {&CodecPolicy::embeddings}, 2);             // at the bottom and at the top
  return sites;
}

std::vector<std::string> site_names(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const CodecSite& site : codec_sites(config)) names.push_back(site.name);
  return names;
}

CodecPolicy codec_at(const ModelConfig& config, std::span<const std::string> sites,
                     const Wire& wire) {
  const std::vector<CodecSite> all = codec_sites(config);
  CodecPolicy policy;
  for (const std::string& name : sites) {
    const auto site = std::ranges::find(all, name, &CodecSite::name);
    if (site == all.end()) {
      throw InvalidArgument(
          fmt::format("site '{}': expected one of {}", name, fmt::join(site_names(config), ", ")));
    }
    set(*site, wire, policy);
  }
  return policy;
}

std::optional<double> parse_percentage(std::string_view text) {
  double percent = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, percent);
  const bool is_percentage = error == std::errc() && end + 1 == last && *end == '%';
  if (!is_percentage || !std::isfinite(percent) || percent < 0) return {};
  return percent / 100;
}

double SentBytes::of(const CodecSite& site, const Wire& wire) const {
  const double row = wire.is_exact() ? double(model.hidden) * wire.bits_per_element(dtype) / 8
                                     : double(wire.bytes(model.hidden, dtype));
  return double(site.rows) * row * (ranks - 1) / ranks;
}

double SentBytes::of(const CodecPolicy& policy) const {
  double bytes = 0;
  for (const CodecSite& site : codec_sites(model)) bytes += of(site, policy.*site.wires.front());
  return bytes;
}

void add_origin(nlohmann::ordered_json& result, const SentBytes& sent, int64_t bytes) {
  const ModelConfig& model = sent.model;
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  result["ranks"] = sent.ranks;
  result["dtype"] = name_of(sent.dtype);
  result["bytes"] = bytes;
  result["model"] = {{"hidden", model.hidden}, {"layers", model.layers}, {"heads", model.heads}};
  result["hardware"] = this_machine().describe();
  result["commit"] = kCommit;
  result["command"] = joined(typed_words());
  result["date"] = fmt::format("{:%FT%TZ}", fmt::gmtime(now));
}

CodecChoice search_codecs(const SentBytes& sent, std::span<const Wire> formats, double budget,
                          const std::function<double(const CodecPolicy&)>& bits_per_byte) {
  return Search(sent, budget, bits_per_byte).run(formats);
}

}  // namespace tandem
