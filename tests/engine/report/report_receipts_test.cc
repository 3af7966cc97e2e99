// The report names the operators of a run that did not overlap, and why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "engine/report/report.h"
#include "tandem/error.h"
#include "tests/engine/report/report_fixture.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

struct RunFolder {
  fs::path path = fs::temp_directory_path() / ("tandem_receipts_" + std::to_string(::getpid()));
  RunFolder() { write_made_up_run(path, "x"); }
  ~RunFolder() { fs::remove_all(path); }
  std::string report_with(const json& receipts) const {
    std::ofstream(path / "receipts.json") << receipts;
    return write_report(path);
  }
  std::string text(const char* name) const {
    std::ifstream in(path / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST(ReportReceipts, NameTheOperatorsThatDidNotOverlap) {
  const RunFolder run;
  EXPECT_THAT(write_report(run.path), Not(HasSubstr("did not overlap:")));
  const std::string why = "no overlapped candidate is 2 % faster: 9.0 us, serial 8.0 us";
  json fast, slow;
  fast["op"] = "ag_gemm";
  fast["shape"] = "m 64";
  fast["dtype"] = "bf16";
  fast["group"] = 2;
  fast["asked"] = "automatic";
  fast["ran"] = "overlapped";
  fast["candidate"] = "fused";
  fast["why"] = "";
  fast["calls"] = 12;
  fast["speedup"] = 1.25;
  slow = fast;
  slow["op"] = "gemm_rs";
  slow["ran"] = "serial";
  slow["why"] = why;
  EXPECT_THAT(run.report_with({fast, slow}),
              HasSubstr("did not overlap: gemm_rs: m 64, 2 ranks: automatic ran as serial: " + why +
                        " (12 calls)\n"));
  EXPECT_EQ(json::parse(run.text("summary.json")).at("receipts"), json({fast, slow}));
  EXPECT_THAT(run.text("report.html"), HasSubstr("operators-table"));
  EXPECT_THAT(run.report_with({fast, fast}),
              HasSubstr("operators: all 2 that were asked to overlap did\n"));
  // Asked for, serial is no failure to overlap.
  slow["asked"] = "serial";
  const std::string text = run.report_with(json::array({slow}));
  EXPECT_THAT(text, Not(HasSubstr("did not overlap:")));
  EXPECT_THAT(text, Not(HasSubstr("operators:")));
  slow["ran"] = "maybe";
  EXPECT_THROW(run.report_with(json::array({slow})), IoError);
}

}  // namespace
}  // namespace tandem
