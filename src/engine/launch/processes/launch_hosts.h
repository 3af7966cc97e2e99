// File of hosts for `tandem launch --hosts`: one a line, as `name [slots=K]`, with comments after
// #.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct LaunchHost {
  std::string name;
  int slots = -1;  ///< max ranks; 0: spares only; -1: an equal share of those that are left
};

/// Throws InvalidArgument with the number of the first line that is wrong, or if there is no host.
std::vector<LaunchHost> parse_hosts(std::string_view text, const std::string& path);

/// Index of each slot's host: ranks in the order of the hosts, neighbours on one host. Spares are
/// spread over the hosts without ranks, or over all, the last host first. Throws InvalidArgument if
/// the hosts have too few slots for the ranks.
std::vector<int> assign_hosts(const std::vector<LaunchHost>& hosts, int ranks, int spares);

}  // namespace tandem
