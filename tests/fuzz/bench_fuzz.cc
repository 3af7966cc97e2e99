// The command line of `bench`, one word per line: a one-line error, or a request within bounds.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "bench/bench_options.h"
#include "cli/usage.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

namespace {

bool one_line(const std::string& text) {
  return !text.empty() && text.find('\n') == std::string::npos;
}

void check(const tandem::BenchPlan& plan, size_t runs) {
  REQUIRE(plan.requests.size() == runs && runs > 0);
  REQUIRE(plan.world.ranks >= 1 && plan.world.ranks <= 4096);
  REQUIRE(!plan.world.link || plan.world.link->bytes_per_s > 0);
  for (const tandem::BenchRequest& request : plan.requests) {
    tandem::check_bench(request, plan.world.ranks);
    int64_t product = 0;
    REQUIRE(request.m >= 1 && request.n >= 1 && request.k >= 1 && request.repeats >= 1);
    REQUIRE(!__builtin_mul_overflow(request.m, request.n, &product));
    REQUIRE(product < int64_t{1} << 48);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  std::vector<std::string> words;
  for (std::string line; std::getline(lines, line);) words.insert(words.begin(), line);
  words.push_back("bench");  // CLI11 takes the last word first
  CLI::App app("", "tandem");
  tandem::BenchOptions options;
  tandem::declare(*app.add_subcommand("bench", ""), options);
  try {
    app.parse(words);
    const size_t sizes = options.bytes.empty() ? 0 : tandem::parse_sizes(options.bytes).size();
    check(tandem::make_plan(options),
          std::max({size_t{1}, options.m.size(), options.shapes.size(), sizes}));
  } catch (const CLI::Success&) {
  } catch (const CLI::ParseError& error) {
    REQUIRE(one_line(tandem::cli::explain(app, error)));
  } catch (const tandem::InvalidArgument& error) {
    REQUIRE(one_line(error.what()));
  }
  return 0;
}
