#include "engine/launch/processes/launch_hosts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "core/system/files.h"
#include "core/system/lines.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int kMaxSlots = 1024;
constexpr size_t kMaxHosts = 1024;

/// Names may not begin like an option of the remote shell.
bool is_host_name(std::string_view name) {
  constexpr std::string_view kAllowed = "._-:@%";
  return !name.starts_with('-') && name.size() < 256 &&
         std::ranges::all_of(name, [&](const char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  kAllowed.find(c) != kAllowed.npos;
         });
}

int parse_slots(const std::string& word, const std::string& where) {
  constexpr std::string_view kKey = "slots=";
  int slots = -1;
  const char* end = word.data() + word.size();
  if (word.starts_with(kKey)) {
    const auto [stop, code] = std::from_chars(word.data() + kKey.size(), end, slots);
    if (code == std::errc() && stop == end && slots >= 0 && slots <= kMaxSlots) return slots;
  }
  throw InvalidArgument(
      fmt::format("{}: {}: expected slots=K, K from 0 to {}", where, printable(word), kMaxSlots));
}

}  // namespace

std::vector<LaunchHost> parse_hosts(std::string_view text, const std::string& path) {
  std::vector<LaunchHost> hosts;
  std::map<std::string, int> lines;
  int number = 0;
  for (const std::string_view line : Lines(std::string(without_bom(text)))) {
    ++number;
    const std::vector<std::string> words = words_of(line.substr(0, line.find('#')));
    if (words.empty()) continue;
    const std::string where = fmt::format("{}: line {}", path, number);
    LaunchHost host;
    host.name = words[0];
    if (!is_host_name(host.name)) {
      throw InvalidArgument(
          fmt::format("{}: host {}: expected a name or an address", where, printable(host.name)));
    }
    if (const auto [at, is_new] = lines.emplace(host.name, number); !is_new) {
      throw InvalidArgument(fmt::format("{}: host {}: also in line {}: expected each host once",
                                        where, host.name, at->second));
    }
    if (words.size() > 1) host.slots = parse_slots(words[1], where);
    if (words.size() > 2) {
      throw InvalidArgument(
          fmt::format("{}: {}: expected the end of the line", where, printable(words[2])));
    }
    if (hosts.size() == kMaxHosts) {
      throw InvalidArgument(fmt::format("{}: expected at most {} hosts", where, kMaxHosts));
    }
    hosts.push_back(host);
  }
  if (hosts.empty()) throw InvalidArgument(path + ": expected a host a line, as: name [slots=K]");
  return hosts;
}

std::vector<int> assign_hosts(const std::vector<LaunchHost>& hosts, int ranks, int spares) {
  int open = 0, given = 0;
  for (const LaunchHost& host : hosts) {
    open += host.slots < 0;
    given += std::max(host.slots, 0);
  }
  if (open == 0 && given < ranks) {
    throw InvalidArgument(
        fmt::format("launch --hosts: {} ranks on hosts with {} slots: expected at least as many "
                    "slots",
                    ranks, given));
  }
  const int shared = std::max(ranks - given, 0);
  std::vector<int> result, without_ranks, all;
  int share_idx = 0;
  for (int host = 0; host < int(hosts.size()); ++host) {
    int count = hosts[size_t(host)].slots;
    if (count < 0) {
      count = shared / open + (share_idx < shared % open);
      ++share_idx;
    }
    count = std::min(count, ranks - int(result.size()));
    result.insert(result.end(), size_t(count), host);
    all.push_back(host);
    if (count == 0) without_ranks.push_back(host);
  }
  const auto& targets = without_ranks.empty() ? all : without_ranks;
  for (int spare = 0; spare < spares; ++spare) {
    result.push_back(targets[targets.size() - 1 - size_t(spare) % targets.size()]);
  }
  return result;
}

}  // namespace tandem
