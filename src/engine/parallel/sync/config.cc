#include "engine/parallel/sync/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/config/section.h"
#include "kernels/dct.h"
#include "tandem/codec.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Key<SyncConfig> kSyncKeys[] = {
    {"method", &SyncConfig::method, one_of("none", "local", "demo"),
     "replicas exchange: none, the gradients of every step; local, what learners have changed in "
     "sync.every steps; demo, the largest cosines of every step's gradients, whose signs are the "
     "update (docs/guide/skip.md)"},
    {"learners", &SyncConfig::learners, Range(0, 4096),
     "groups of consecutive ranks that train apart; divides parallel.dp"},
    {"every", &SyncConfig::every, Range(0, kBig),
     "steps from one exchange of a weight to the next; 1 with method demo"},
    {"fragments", &SyncConfig::fragments, Range(0, 4096),
     "parts of the model that are exchanged in turn (0: 1)"},
    {"delay", &SyncConfig::delay, Range(0, kBig),
     "steps that go on while a fragment is exchanged; less than sync.every / sync.fragments"},
    {"codec", &SyncConfig::codec, kAny,
     "wire format of what is exchanged, as --codec: \"int4:g32\""},
    {"outer.lr", &SyncConfig::outer_lr, Range(-1, 1e3),
     "step of the exchanged weights along the learners' mean change (-1: 0.7; 1 with sync.topk)"},
    {"outer.momentum", &SyncConfig::outer_momentum, Range(-1, 0.999999),
     "of that change (-1: 0.9; 0 with sync.topk)"},
    {"outer.nesterov", &SyncConfig::outer_nesterov, kAny, "Nesterov's momentum"},
    {"mix", &SyncConfig::mix, Range(-1, 1),
     "share of its own weights that a learner keeps with sync.delay (-1: 0.5)"},
    {"quorum", &SyncConfig::quorum, Range(0, 4096),
     "learners whose messages an exchange waits for; what others have changed is added to their "
     "next message (0: sync.learners)"},
    {"topk", &SyncConfig::topk, Range(-1, kMaxDctTile* kMaxDctTile),
     "share of each 4096 changes that is sent, the largest; the rest is added to the next (-1: "
     "all); with method demo cosines of each tile x tile, and of a smaller tile as many in "
     "proportion, at least one (-1: 32)"},
    {"bits", &SyncConfig::bits, Range(0, 8),
     "of each change that is sent with sync.topk, 2 to 8 (0: 2; with method demo 8)"},
    {"beta", &SyncConfig::beta, Range(-1, 1),
     "decay of the changes that were not sent (-1: 0.95; with method demo 0.999)"},
    {"tile", &SyncConfig::tile, Range(0, kMaxDctTile),
     "largest side of the tiles that method demo transforms (0: 64)"},
};

[[noreturn]] void reject(std::string_view key, const std::string& value,
                         const std::string& expected) {
  throw ConfigError(fmt::format("sync.{} is {}: expected {}", key, value, expected));
}

bool is_used(const SyncConfig& sync, std::string_view key) {
  const auto is_one_of = [key](std::initializer_list<std::string_view> keys) {
    return std::ranges::find(keys, key) != keys.end();
  };
  if (key == "method") return true;
  if (!sync.is_on() || (key == "codec" && sync.is_sparse())) return false;
  if (is_one_of({"bits", "beta"})) return sync.is_sparse();
  if (key == "tile") return sync.is_demo();
  return !sync.is_demo() || is_one_of({"learners", "every", "topk"});
}

/// Keys that are given and that the method does not use.
void check_unused(const SyncConfig& sync) {
  const SyncConfig fresh;
  for (const Key<SyncConfig>& key : SyncConfig::keys()) {
    SyncConfig given = sync, absent = fresh;
    const ConfigSlot value = key.value(given), unset = key.value(absent);
    const bool is_set = std::visit(
        [&unset](auto* slot) { return *slot != *std::get<decltype(slot)>(unset); }, value);
    if (!is_set || is_used(sync, key.name)) continue;
    const std::string text = std::visit(
        [](auto* slot) {
          if constexpr (std::is_arithmetic_v<std::remove_pointer_t<decltype(slot)>>) {
            return fmt::format("{}", *slot);
          } else if constexpr (std::is_same_v<decltype(slot), std::string*>) {
            return fmt::format("\"{}\"", *slot);
          } else {
            return std::string();
          }
        },
        value);
    reject(key.name, text,
           !sync.is_on()                              ? "sync.method = \"local\" with it"
           : key.name == "bits" || key.name == "beta" ? "sync.topk with it"
           : key.name == "codec" && !sync.is_demo()
               ? "no such key with sync.topk"
               : fmt::format("no such key with sync.method = \"{}\"", sync.method));
  }
}

}  // namespace

std::span<const Key<SyncConfig>> SyncConfig::keys() {
  return kSyncKeys;
}

codec::TopK SyncConfig::sparse(int chunk) const {
  const int of_method = is_demo() ? 8 : 2;
  const double of_tile = topk > 0 ? topk : 32;
  const double share = is_demo() ? of_tile / (tile_side() * tile_side()) : topk;
  return {.chunk = chunk,
          .k = std::clamp(int(std::lround(share * chunk)), 1, chunk),
          .bits = bits > 0 ? int(bits) : of_method};
}

void SyncConfig::check(int64_t dp) const {
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  const bool is_given = topk != -1;
  if (is_given && is_demo() && (topk < 1 || topk != std::floor(topk))) {
    reject("topk", text(topk), "a number of cosines, at least 1, with sync.method = \"demo\"");
  }
  if (is_given && !is_demo() && (topk <= 0 || topk > 1)) {
    reject("topk", text(topk), "a share above 0, at most 1");
  }
  for (const auto& [key, value] :
       {std::pair("outer.lr", outer_lr), std::pair("outer.momentum", outer_momentum),
        std::pair("mix", mix), std::pair("beta", beta)}) {
    if (value < 0 && value != -1) reject(key, text(value), "0 or more");
  }
  check_unused(*this);
  if (!is_on()) return;
  if (bits == 1) reject("bits", "1", "2 to 8");
  if (is_demo() && learners < 2) {
    reject("learners", text(learners), "at least 2 with sync.method = \"demo\"");
  }
  if (is_demo() && every > 1) reject("every", text(every), "1 with sync.method = \"demo\"");
  if (learners < 1 || dp % learners != 0) {
    reject("learners", text(learners), fmt::format("a divisor of parallel.dp = {}", dp));
  }
  if (period() < 1) reject("every", text(every), "at least 1 step");
  if (num_fragments() > period()) {
    reject("fragments", text(fragments), fmt::format("at most sync.every = {}", every));
  }
  if (delay > 0 && delay >= every / num_fragments()) {
    reject("delay", text(delay),
           fmt::format("less than sync.every / sync.fragments = {}", every / num_fragments()));
  }
  if (mix >= 0 && delay == 0) reject("mix", text(mix), "sync.delay with it");
  if (quorum > learners) {
    reject("quorum", text(quorum), fmt::format("at most sync.learners = {}", learners));
  }
  try {
    Wire::parse(codec);
  } catch (const InvalidArgument& error) {
    throw ConfigError(fmt::format("sync.codec: {}", error.what()));
  }
}

}  // namespace tandem
