// Hosts of ranks and spares, against rules that every assignment must obey.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/launch/processes/launch_hosts.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<LaunchHost> hosts_of(const std::vector<int>& slots) {
  std::vector<LaunchHost> hosts;
  for (const int count : slots) hosts.push_back({std::string(hosts.size() + 1, 'h'), count});
  return hosts;
}

TEST(AssignHosts, ExamplesOfTheHeader) {
  EXPECT_THAT(assign_hosts(hosts_of({-1, -1}), 5, 0), ElementsAre(0, 0, 0, 1, 1));
  EXPECT_THAT(assign_hosts(hosts_of({1, -1}), 4, 1), ElementsAre(0, 1, 1, 1, 1));
  EXPECT_THAT(assign_hosts(hosts_of({2, 2, 0}), 4, 2), ElementsAre(0, 0, 1, 1, 2, 2));
  EXPECT_THAT(assign_hosts(hosts_of({-1, -1}), 2, 3), ElementsAre(0, 1, 1, 0, 1));
}

// Every list of up to three hosts with few slots.
TEST(AssignHosts, EachRankHasAHostWithASlotAndNeighboursShareIt) {
  int assigned = 0, refused = 0;
  for (int a = -2; a <= 3; ++a) {
    for (int b = -2; b <= 3; ++b) {
      for (int c = -1; c <= 3; ++c) {
        std::vector<int> slots{c};
        if (a >= -1) slots.push_back(a);
        if (b >= -1) slots.push_back(b);
        int given = 0, open = 0;
        for (const int count : slots) {
          given += std::max(count, 0);
          open += count < 0;
        }
        for (int ranks = 1; ranks <= 10; ++ranks) {
          SCOPED_TRACE(testing::PrintToString(slots) + " ranks " + std::to_string(ranks));
          if (open == 0 && given < ranks) {
            EXPECT_THROW(assign_hosts(hosts_of(slots), ranks, 2), InvalidArgument);
            ++refused;
            continue;
          }
          ++assigned;
          const auto all = assign_hosts(hosts_of(slots), ranks, 2);
          ASSERT_EQ(int(all.size()), ranks + 2);
          EXPECT_TRUE(std::is_sorted(all.begin(), all.begin() + ranks));
          std::vector<int> counts(slots.size());
          for (int rank = 0; rank < ranks; ++rank) ++counts.at(size_t(all[size_t(rank)]));
          int smallest = ranks, largest = 0;
          for (size_t host = 0; host < slots.size(); ++host) {
            if (slots[host] >= 0) {
              EXPECT_LE(counts[host], slots[host]);
              continue;
            }
            smallest = std::min(smallest, counts[host]);
            largest = std::max(largest, counts[host]);
          }
          if (open > 0) {
            EXPECT_LE(largest - smallest, 1);
          }
          const bool has_idle = std::ranges::count(counts, 0) > 0;
          for (size_t spare = size_t(ranks); spare < all.size(); ++spare) {
            if (has_idle) {
              EXPECT_EQ(counts.at(size_t(all[spare])), 0);
            }
          }
        }
      }
    }
  }
  EXPECT_GT(assigned, 500);
  EXPECT_GT(refused, 100);
}

TEST(ParseHosts, LinesAreNamesWithSlots) {
  const auto hosts = parse_hosts(
      "\xef\xbb\xbf# all\r\n\r\n a  slots=2 # two\r\nuser@10.0.0.1\r\nb slots=0", "hosts");
  ASSERT_EQ(hosts.size(), 3u);
  EXPECT_EQ(hosts[0].name, "a");
  EXPECT_EQ(hosts[0].slots, 2);
  EXPECT_EQ(hosts[1].name, "user@10.0.0.1");
  EXPECT_EQ(hosts[1].slots, -1);
  EXPECT_EQ(hosts[2].slots, 0);
}

TEST(ParseHosts, WrongLinesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "hosts: expected a host a line"},
      {"# none", "hosts: expected a host a line"},
      {"a\n-oProxyCommand=x", "hosts: line 2: host -oProxyCommand=x"},
      {"a;b", "hosts: line 1: host a;b"},
      {"a\nb\na", "hosts: line 3: host a: also in line 1"},
      {"a slots=-1", "hosts: line 1: slots=-1: expected slots=K"},
      {"a slots=1025", "expected slots=K, K from 0 to 1024"},
      {"a slots=", "expected slots=K"},
      {"a slots=2x", "expected slots=K"},
      {"a 2", "hosts: line 1: 2: expected slots=K"},
      {"a slots=1 b", "hosts: line 1: b: expected the end"}};
  for (const auto& [text, words] : cases) {
    try {
      parse_hosts(text, "hosts");
      ADD_FAILURE() << text << ": accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(words)) << text;
    }
  }
}

}  // namespace
}  // namespace tandem
