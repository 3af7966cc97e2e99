#include "engine/report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>
#include <regex>

#include "engine/report/ranks/load_map.h"
#include "engine/report/report_data.h"
#include "observe/rank_records.h"
#include "tandem/error.h"
#include "tests/engine/report/report_fixture.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

const char kNastySample[] =
    "#include <</script><img src=x onerror=\"document.title='owned'\"> @DATA@ <!-- \xff\xfe\x01 "
    "end";

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Folder {
  fs::path path = fs::temp_directory_path() / ("tandem_report_test_" + std::to_string(::getpid()));
  ~Folder() { fs::remove_all(path); }
};

TEST(Report, ReportsTheBalanceOfExperts) {
  const Folder folder;
  write_made_up_run(folder.path, "x");
  std::string lines;
  for (int step = 1; step <= 20; ++step) {
    lines += "{\"step\":" + std::to_string(step) +
             ",\"loss\":2,\"tokens_per_s\":1000,\"step_ms\":100,\"compute_ms\":90,"
             "\"exposed_comm_ms\":5,\"aux_loss\":0.02,\"imbalance\":[1.1,1.2],"
             "\"expert_imbalance\":[1.5,2.25]}\n";
  }
  std::ofstream(folder.path / "metrics.jsonl") << lines;
  EXPECT_THAT(write_report(folder.path),
              HasSubstr("Experts: rows of the fullest over the mean, by layer: 1.50 2.25"));
  const json summary = json::parse(read(folder.path / "summary.json"));
  EXPECT_EQ(summary.at("training").at("expert_imbalance"), json({1.5, 2.25}));
}

TEST(Report, ExpertLoadIsAveragedOverSteps) {
  report::LoadMap map;
  EXPECT_TRUE(map.empty());
  // Layer 0: expert 2 has twice its share. Layer 1: expert 0 has all rows in the second half.
  for (int step = 1; step <= 1024; ++step) {
    const bool late = step > 512;
    map.add(step, {{5, 5, 20, 10},
                   {late ? 40.0 : 10, late ? 0.0 : 10, late ? 0.0 : 10, late ? 0.0 : 10}});
  }
  const json made = map.json();
  const auto steps = made.at("steps").get<std::vector<double>>();
  ASSERT_EQ(steps.size(), 64u);  // of 16 steps each
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i], double(16 * i + 1));
  ASSERT_EQ(made.at("load").size(), 2u);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(made.at("load")[0][i], json({0.5, 0.5, 2.0, 1.0}));
    EXPECT_EQ(made.at("load")[1][i],
              i < 32 ? json({1.0, 1.0, 1.0, 1.0}) : json({4.0, 0.0, 0.0, 0.0}));
  }
  EXPECT_THROW(map.add(1025, {{1, 2, 3, 4}}), IoError);
  EXPECT_THROW(map.add(1025, {{1, 2, 3}, {1, 2, 3, 4}}), IoError);
}

TEST(Report, MalformedExpertRowsAreNamed) {
  const Folder folder;
  fs::create_directories(folder.path);
  std::ofstream(folder.path / "metrics.jsonl")
      << "{\"step\":1,\"loss\":2,\"expert_rows\":[[1,2],[3,4]]}\n"
         "{\"step\":2,\"loss\":2,\"expert_rows\":[[1,2]]}\n";
  try {
    write_report(folder.path);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("expert_rows of step 2: expected 2 layers of 2 experts"));
  }
}

TEST(Report, NumbersComeFromTheFiles) {
  const Folder folder;
  write_made_up_run(folder.path, "#include <vector>\n");
  const std::string text = write_report(folder.path);
  const json summary = json::parse(read(folder.path / "summary.json"));

  EXPECT_EQ(summary.at("training").at("steps"), 600);
  EXPECT_NEAR(summary.at("training").at("step_ms").get<double>(), 106, 0.2);
  EXPECT_NEAR(summary.at("training").at("gemm_share").get<double>(), 64.0 / 106, 0.01);
  EXPECT_NEAR(summary.at("training").at("mfu").get<double>(), 0.4, 1e-9);
  EXPECT_EQ(summary.at("training").at("validation_unit"), "token");
  EXPECT_NEAR(summary.at("training").at("validation_loss").get<double>(),
              summary.at("training").at("final_loss").get<double>() + 0.1, 1e-3);
  const json& held_out = summary.at("held_out");
  EXPECT_DOUBLE_EQ(held_out.at("compressors")[0].at("bits_per_byte").get<double>(), 2.32);
  EXPECT_DOUBLE_EQ(held_out.at("compressors")[1].at("bits_per_byte").get<double>(), 2.1);

  // serial: 100 + 41, overlapped: 100 + 3.5, so the floor is 100 and E = 1 - 3.5 / 41.
  const json& split = summary.at("step_split");
  EXPECT_NEAR(split.at("rows")[0].at("ect_ms").get<double>(), 41, 0.2);
  EXPECT_NEAR(split.at("rows")[1].at("ect_ms").get<double>(), 3.5, 0.2);
  EXPECT_NEAR(split.at("efficiency").get<double>(), 1 - 3.5 / 41, 0.01);
  EXPECT_TRUE(summary.at("omitted").empty());
  EXPECT_THAT(text, HasSubstr("xz -9         2.100 bits per byte"));
  EXPECT_THAT(text, HasSubstr(" nats per token"));
  EXPECT_THAT(text, HasSubstr("emulated 1 GB/s 20 us link"));
  EXPECT_THAT(text, HasSubstr("link chosen so that the 5.0 MB of a step"));
  EXPECT_THAT(text, HasSubstr("E = 1 - ECT(overlapped) / ECT(serial) = 91."));
}

/// Removes text that differs from run to run, and the validation loss and the choice of a link,
/// which the run of docs/start/laptop.md omits.
std::string shape_of_lines(const std::string& text) {
  std::string shape = std::regex_replace(text, std::regex("emulated [^:]* link"), "LINK");
  shape = std::regex_replace(shape, std::regex("\n(Validation loss: |link chosen )[^\n]*"), "");
  shape = std::regex_replace(shape, std::regex("-?[0-9]+([.][0-9]+)?"), "#");
  return std::regex_replace(shape, std::regex(" +"), " ");
}

TEST(Report, PageOfTheFirstRunShowsItsLines) {
  const std::string page = read(fs::path(TANDEM_SOURCE_DIR) / "docs/start/laptop.md");
  const size_t begin = page.find("Training: "), end = page.find("Wrote out/report.html");
  ASSERT_LT(begin, end);
  ASSERT_NE(end, std::string::npos);
  const Folder folder;
  write_made_up_run(folder.path, "#include <vector>\n");
  EXPECT_EQ(shape_of_lines(page.substr(begin, end - begin)),
            shape_of_lines(write_report(folder.path)));
}

TEST(Report, ColumnsOfTheStepSplitAddUp) {
  const Folder folder;
  write_made_up_run(folder.path, "x");
  std::ofstream out(folder.path / "split/serial/metrics.jsonl");
  for (int step = 1; step <= 24; ++step) {  // the columns vary in opposite directions
    const double gemm = 20 + step % 5, compute = gemm + 10 - step % 3, exposed = 30 - step % 7;
    out << "{\"step\":" << step
        << ",\"loss\":1,\"tokens_per_s\":1,\"step_ms\":" << compute + exposed + 1
        << ",\"gemm_ms\":" << gemm << ",\"compute_ms\":" << compute
        << ",\"exposed_comm_ms\":" << exposed << "}\n";
  }
  out.close();
  const std::string text = write_report(folder.path);
  const json row = json::parse(read(folder.path / "summary.json")).at("step_split").at("rows")[0];
  const auto ms = [&](const char* key) { return row.at(key).get<double>(); };
  EXPECT_NEAR(ms("rest_ms"), 1, 1e-9);
  EXPECT_NEAR(ms("gemm_ms") + ms("other_compute_ms") + ms("exposed_comm_ms") + ms("rest_ms"),
              ms("step_ms"), 1e-9);
  EXPECT_THAT(text, HasSubstr("add up to the step"));
}

TEST(Report, StepsAreComparedInPairs) {
  const Folder folder;
  write_made_up_run(folder.path, "x");
  // Every other pair is measured on a busy machine, and some overlapped steps are slowed
  // separately.
  for (const bool overlapped : {false, true}) {
    std::ofstream out(folder.path / "split" / (overlapped ? "overlapped" : "serial") /
                      "metrics.jsonl");
    for (int i = 0; i < 24; ++i) {
      const int busy = 1 + i % 2, hit = overlapped && i % 5 == 0 ? 500 : 0;
      out << "{\"step\":" << i + 1
          << ",\"loss\":1,\"step_ms\":" << (overlapped ? 90 : 100) * busy + hit
          << ",\"gemm_ms\":60,\"compute_ms\":" << 80 * busy + hit
          << ",\"exposed_comm_ms\":" << (overlapped ? 10 : 20) * busy << "}\n";
    }
  }
  const std::string text = write_report(folder.path);
  const json split = json::parse(read(folder.path / "summary.json")).at("step_split");
  EXPECT_EQ(split.at("pairs"), 22);
  EXPECT_EQ(split.at("pairs_overlapped_faster"), 18);
  EXPECT_NEAR(split.at("efficiency").get<double>(), 0.5, 1e-9);
  EXPECT_THAT(text, HasSubstr("overlapped was faster in 18 of 22 pairs of steps"));
  EXPECT_THAT(text, HasSubstr("chance alone gives as many in 0.22 % of measurements"));
  EXPECT_THAT(text, Not(HasSubstr("not shown")));
}

TEST(Report, WarnsIfStepsWereTimedOnABusyMachine) {
  const Folder folder;
  write_made_up_run(folder.path, "x");
  const std::string warning = "Other programs kept 40 % of the processors busy";
  EXPECT_THAT(write_report(folder.path), Not(HasSubstr(warning)));
  json run = json::parse(read(folder.path / "run.json"));
  run["others_share"] = 0.4;
  std::ofstream(folder.path / "run.json") << run.dump();
  EXPECT_THAT(write_report(folder.path), HasSubstr(warning));
  EXPECT_THAT(read(folder.path / "report.html"), HasSubstr(warning));
}

TEST(Report, MissingFilesAreNamedOrOmitted) {
  const Folder folder;
  fs::create_directories(folder.path);
  try {
    write_report(folder.path);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("metrics.jsonl: not found"));
  }
  EXPECT_FALSE(fs::exists(folder.path / "report.html"));
  write_metrics(folder.path / "metrics.jsonl", 1, 2);
  const std::string text = write_report(folder.path);
  EXPECT_EQ(json::parse(read(folder.path / "summary.json")).at("omitted").size(), 4u);
  EXPECT_THAT(text, HasSubstr("Not shown: timeline (no trace.json with events)"));
}

TEST(Report, WrongFilesAreNamedWithTheLine) {
  const Folder folder;
  const auto message = [&] {
    try {
      write_report(folder.path);
    } catch (const IoError& error) {
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  const auto with = [&](const char* file, const std::string& text) {
    write_made_up_run(folder.path, "x");
    std::ofstream(folder.path / file) << text;
    return message();
  };
  EXPECT_THAT(with("metrics.jsonl", "{\"step\":1,\"loss\":2}\n{\"step\":\n"),
              HasSubstr("metrics.jsonl:2:"));
  EXPECT_EQ(with("metrics.jsonl", "{\"step\":1,\"loss\":2}\n{\"step\":"), "nothing thrown");
  EXPECT_THAT(with("metrics.jsonl", "{\"step\":\"one\",\"loss\":2}\n"),
              HasSubstr("metrics.jsonl:1:"));
  EXPECT_THAT(with("metrics.jsonl", ""), HasSubstr("is empty"));
  EXPECT_THAT(with("run.json", "{"), HasSubstr("run.json"));
  EXPECT_THAT(with("run.json", "{\"heldout\":{}}"), HasSubstr("run.json"));
  EXPECT_THAT(with("split/serial/trace.json", "[]"), HasSubstr("serial/trace.json"));
  EXPECT_THAT(with("split/serial/trace.json",
                   R"({"traceEvents":[{"ph":"X","pid":0,"ts":0,"dur":1,"cat":"?","name":"a",)"
                   R"("args":{}}]})"),
              HasSubstr("category '?'"));
}

TEST(Report, NonFiniteLossIsDrawnAsAGap) {
  const Folder folder;
  write_made_up_run(folder.path, "x");
  std::ofstream(folder.path / "metrics.jsonl", std::ios::app) << "{\"step\":601,\"loss\":null}\n";
  write_report(folder.path);
  EXPECT_TRUE(
      json::parse(read(folder.path / "summary.json")).at("training").at("final_loss").is_null());
}

TEST(Report, DataCannotEscapeItsScript) {
  const Folder folder;
  write_made_up_run(folder.path, kNastySample);
  write_report(folder.path);
  const std::string html = read(folder.path / "report.html");
  EXPECT_THAT(html, Not(HasSubstr("<img src=x")));
  EXPECT_THAT(html, HasSubstr("\\u003c/script>\\u003cimg src=x"));
  for (const char* mark : {"@STYLE@", "@CHARTJS@", "@TIMELINE@", "@SCRIPT@"}) {
    EXPECT_THAT(html, Not(HasSubstr(mark)));
  }
  for (const char* outside : {"src=\"http", "href=\"http", "@import", "url(http"}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
}

TEST(ReportTimeline, ShowsTheSecondLayer) {
  const auto ranks = made_up_trace(true);
  const auto timeline = report::layer_timeline(ranks);
  ASSERT_EQ(timeline.at("ranks").size(), 2u);
  std::vector<std::string> names;
  for (const auto& slice : timeline.at("ranks")[0].at("slices")) {
    const std::string kind = slice.at("kind"), name = slice.at("name");
    if (kind != "gemm" && kind != "compute") continue;
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  EXPECT_THAT(names, testing::ElementsAre("rmsnorm", "ag_gemm", "attention", "gemm_rs", "rmsnorm",
                                          "ag_gemm", "swiglu", "gemm_rs"));
  double last = 0;
  for (const auto& slice : timeline.at("ranks")[0].at("slices")) {
    EXPECT_GE(slice.at("begin").get<double>(), 0);
    last = std::max(last, slice.at("end").get<double>());
  }
  EXPECT_DOUBLE_EQ(last, timeline.at("span_us").get<double>());
  EXPECT_FALSE(timeline.at("arrows").empty());
  EXPECT_LT(timeline.at("span_us").get<double>(),
            report::layer_timeline(made_up_trace(false)).at("span_us").get<double>());
}

TEST(ReportTimeline, ShowsAllIfNothingRepeats) {
  EXPECT_DOUBLE_EQ(report::layer_timeline(made_up_trace(true, 0)).at("span_us").get<double>(), 60);
  EXPECT_EQ(report::layer_timeline({}).at("span_us"), 0);
}

TEST(ReportTimeline, ReaderIsTheInverseOfTheWriter) {
  const Folder folder;
  fs::create_directories(folder.path);
  const auto ranks = made_up_trace(true);
  write_trace(folder.path / "a.json", ranks);
  write_trace(folder.path / "b.json", read_trace(folder.path / "a.json"));
  EXPECT_TRUE(read(folder.path / "a.json") == read(folder.path / "b.json"));
}

// Errors and messages of the page after drawing, collected by two scripts around its own.
constexpr const char* kErrorObserver = R"(<script>
  window.seen = [];
  window.addEventListener("error", (e) => seen.push(String(e.message)), true);
  for (const level of ["error", "warn", "log"]) console[level] = (...a) => seen.push(a.join(" "));
</script>)";
constexpr const char* kProbe = R"(<script>
  addEventListener("load", () => setTimeout(() => {
    for (const key of ["ArrowDown", "ArrowRight"]) {
      document.getElementById("ranks-map")?.dispatchEvent(new KeyboardEvent("keydown", { key }));
    }
    const canvases = {};
    for (const c of document.querySelectorAll("section:not([hidden]) canvas")) {
      const colors = new Set();
      const pixels = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer);
      let ink = 0;
      for (const p of pixels) if (p >>> 24) { ++ink; if (p >>> 24 === 255) colors.add(p); }
      canvases[c.id] = { ink: ink / pixels.length, colors: colors.size };
    }
    const probe = document.createElement("pre");
    probe.id = "probe";
    probe.textContent = "PROBE" + JSON.stringify({ canvases, seen, title: document.title,
      svgs: document.querySelectorAll("#timelines svg").length,
      slices: document.querySelectorAll("#timelines rect.slice").length,
      arrows: document.querySelectorAll("#timelines path.arrow").length,
      images: document.querySelectorAll("img").length,
      hidden: [...document.querySelectorAll("section[hidden]")].map((s) => s.id),
      sample: document.getElementById("sample-text").textContent,
      cell: document.getElementById("ranks-cell").textContent,
      slow: [...document.querySelectorAll("#ranks-slow li")].map((line) => line.textContent),
      wider: document.documentElement.scrollWidth > innerWidth,
    }) + "PROBE";
    document.body.append(probe);
  }, 300));
</script>)";

std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  std::array<char, 4096> block;
  for (size_t n; (n = fread(block.data(), 1, block.size(), pipe)) > 0;)
    text.append(block.data(), n);
  pclose(pipe);
  return text;
}

json open_in_browser(const fs::path& dir, int width) {
  std::string html = read(dir / "report.html");
  html.insert(html.find("<head>") + 6, kErrorObserver);
  html.insert(html.rfind("</body>"), kProbe);
  std::ofstream(dir / "probe.html") << html;
  const std::string command =
      "timeout 60 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage "
      "--enable-logging=stderr --v=0 --user-data-dir='" +
      (dir / "profile").string() + "' --window-size=" + std::to_string(width) +
      ",1800 --virtual-time-budget=4000 --dump-dom "
      "'file://" +
      (dir / "probe.html").string() + "' 2>'" + (dir / "console.txt").string() + "'";
  const std::string dom = output_of(command);
  const size_t begin = dom.rfind("PROBE{"), end = dom.rfind("}PROBE");
  if (begin == std::string::npos || end == std::string::npos) {
    ADD_FAILURE() << "the page did not report: " << read(dir / "console.txt").substr(0, 2000);
    return {};
  }
  std::string text = dom.substr(begin + 5, end + 1 - begin - 5);
  for (const auto& [entity, character] :
       {std::pair<std::string, std::string>{"&lt;", "<"}, {"&gt;", ">"}, {"&amp;", "&"}}) {
    for (size_t at = 0; (at = text.find(entity, at)) != std::string::npos; ++at) {
      text.replace(at, entity.size(), character);
    }
  }
  return json::parse(text);
}

bool has_browser() {
  return std::system("command -v chromium >/dev/null 2>&1") == 0;
}

TEST(ReportBrowser, DrawsEveryChartWithoutErrors) {
  if (!has_browser()) GTEST_SKIP() << "chromium is not installed";
  const Folder folder;
  write_made_up_run(folder.path, kNastySample);
  std::ofstream(folder.path / "receipts.json")
      << R"([{"op": "gemm_rs", "shape": "m 64", "group": 2, "asked": "automatic", "ran": "serial",
              "candidate": "</script>", "why": "serial is faster", "calls": 3, "speedup": null}])";
  write_report(folder.path);
  for (const int width : {1280, 500}) {
    const json seen = open_in_browser(folder.path, width);
    ASSERT_TRUE(seen.is_object());
    EXPECT_TRUE(seen.at("seen").empty()) << seen.at("seen");
    EXPECT_THAT(read(folder.path / "console.txt"), Not(HasSubstr("CONSOLE")));
    ASSERT_EQ(seen.at("canvases").size(), 4u);
    for (const auto& [id, canvas] : seen.at("canvases").items()) {
      EXPECT_GT(canvas.at("ink").get<double>(), 0.005) << id;
      EXPECT_GE(canvas.at("colors").get<int>(), 2) << id;
    }
    EXPECT_EQ(seen.at("svgs"), 2);
    EXPECT_GE(seen.at("slices").get<int>(), 80);
    EXPECT_GE(seen.at("arrows").get<int>(), 4);
    EXPECT_EQ(seen.at("images"), 0);
    EXPECT_EQ(seen.at("title"), "Made-up run – report");
    EXPECT_EQ(seen.at("hidden"),
              json({"runs", "experts", "ranks", "groups", "links", "configuration"}));  // none here
    EXPECT_THAT(seen.at("sample").get<std::string>(), HasSubstr("</script><img src=x onerror="));
    EXPECT_FALSE(seen.at("wider").get<bool>()) << "the page scrolls sideways at " << width;
  }
}

TEST(ReportBrowser, DrawsAMapOfEveryLayerWithExperts) {
  if (!has_browser()) GTEST_SKIP() << "chromium is not installed";
  const Folder folder;
  fs::create_directories(folder.path);
  write_expert_metrics(folder.path / "metrics.jsonl", 300, 3, 16);
  write_report(folder.path);
  for (const int width : {1280, 500}) {
    const json seen = open_in_browser(folder.path, width);
    ASSERT_TRUE(seen.is_object());
    EXPECT_TRUE(seen.at("seen").empty()) << seen.at("seen");
    EXPECT_THAT(read(folder.path / "console.txt"), Not(HasSubstr("CONSOLE")));
    EXPECT_GT(seen.at("canvases").at("load").at("ink").get<double>(), 0.005);
    for (const char* map : {"map-0", "map-1", "map-2"}) {
      EXPECT_EQ(seen.at("canvases").at(map).at("ink"), 1) << map;
      EXPECT_GE(seen.at("canvases").at(map).at("colors").get<int>(), 20) << map;
    }
    EXPECT_FALSE(seen.at("wider").get<bool>()) << "the page scrolls sideways at " << width;
  }
}

TEST(ReportBrowser, DrawsAMapOfRanksThatKeysRead) {
  if (!has_browser()) GTEST_SKIP() << "chromium is not installed";
  const Folder folder;
  fs::create_directories(folder.path);
  write_metrics(folder.path / "metrics.jsonl", 100, 2);
  for (int rank = 0; rank < 4; ++rank) {
    RankRecords records(folder.path / "ranks",
                        {.rank = rank, .ranks = 4, .dp = rank, .host = "<b>"}, 0);
    for (int64_t step = 1; step <= 100; ++step) {
      PhaseTimes phases{};
      phases[size_t(Phase::forward)] = 30 + double(step % 7);
      phases[size_t(Phase::backward)] = (rank == 1 && step > 50 ? 80 : 60) + double(step % 5);
      records.add(step, 120, phases);
    }
  }
  write_report(folder.path);
  for (const int width : {1280, 400}) {
    const json seen = open_in_browser(folder.path, width);
    ASSERT_TRUE(seen.is_object());
    EXPECT_TRUE(seen.at("seen").empty()) << seen.at("seen");
    EXPECT_EQ(seen.at("canvases").at("ranks-map").at("ink"), 1);
    EXPECT_GE(seen.at("canvases").at("ranks-map").at("colors").get<int>(), 3);
    EXPECT_THAT(seen.at("cell").get<std::string>(),
                testing::MatchesRegex("rank 1 .tp 0, dp 1, pp 0, host <b>., step.*: own work "
                                      "[0-9.]* ms, [0-9.]*× its stage's median"));
    EXPECT_GT(seen.at("canvases").at("space-map").at("ink").get<double>(), 0.001);
    EXPECT_GE(seen.at("canvases").at("space-map").at("colors").get<int>(), 3);
    ASSERT_EQ(seen.at("slow").size(), 1u);
    EXPECT_THAT(seen.at("slow")[0].get<std::string>(), HasSubstr("rank 1 "));
    EXPECT_FALSE(seen.at("wider").get<bool>()) << "the page scrolls sideways at " << width;
  }
}

TEST(ReportBrowser, DrawsARunOfOneStep) {
  if (!has_browser()) GTEST_SKIP() << "chromium is not installed";
  const Folder folder;
  fs::create_directories(folder.path);
  write_metrics(folder.path / "metrics.jsonl", 1, 2);
  write_report(folder.path);
  const json seen = open_in_browser(folder.path, 1000);
  ASSERT_TRUE(seen.is_object());
  EXPECT_TRUE(seen.at("seen").empty()) << seen.at("seen");
  EXPECT_GT(seen.at("canvases").at("loss").at("ink").get<double>(), 0);
  EXPECT_THAT(
      seen.at("hidden"),
      testing::UnorderedElementsAre("split", "operators", "timeline", "heldout", "experts", "ranks",
                                    "groups", "links", "sample", "runs", "configuration"));
}

}  // namespace
}  // namespace tandem
