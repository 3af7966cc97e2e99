# Data files: installed ones, the tuner's times for common hardware; and those embedded in the
# library: pages, their chart library, and the runs that plans are fitted to.
include(GNUInstallDirs)
set(shipped_tuner ${PROJECT_SOURCE_DIR}/src/tune/shipped_tuner.json)
configure_file(${shipped_tuner} ${PROJECT_BINARY_DIR}/share/tandem/shipped_tuner.json COPYONLY)
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/core/system/process/data_file.cc PROPERTIES
  COMPILE_DEFINITIONS TANDEM_DATA_DIR="${CMAKE_INSTALL_FULL_DATADIR}/tandem")

# embed(NAME HEADER constant=file...): creates a source file that defines HEADER's constants.
function(embed name header)
  string(JOIN "," pairs ${ARGN})
  string(REGEX REPLACE "[A-Za-z]+=" "" files "${ARGN}")
  set(out ${PROJECT_BINARY_DIR}/generated/${name}.cc)
  add_custom_command(OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} -DHEADER=${header} -DFILES=${pairs}
      -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${PROJECT_SOURCE_DIR}/cmake/embed.cmake ${files}
    VERBATIM)
  target_sources(tandem_objects PRIVATE ${out})
endfunction()

if(NOT TANDEM_TRAINING)
  return()
endif()

find_file(CHART_JS chart.min.js PATHS /usr/share/javascript/chart.js REQUIRED
  DOC "Chart.js 3 (Debian: libjs-chart.js)")
set(page_dir ${PROJECT_SOURCE_DIR}/src/engine/report/page)
embed(page_assets engine/report/page_assets.h kPageHead=${page_dir}/head.html
  kPageHtml=${page_dir}/page.html
  kPageStyle=${page_dir}/style.css kPageTimeline=${page_dir}/timeline.js
  kPageCommon=${page_dir}/common.js kPageCurves=${page_dir}/curves.js
  kPageCurvesHtml=${page_dir}/curves.html kPageRanks=${page_dir}/ranks.js
  kPageRanksHtml=${page_dir}/ranks.html kPageGroups=${page_dir}/groups.js
  kPageGroupsHtml=${page_dir}/groups.html kPageLattice=${page_dir}/lattice.js
  kPageSpace=${page_dir}/space.js kPageLinks=${page_dir}/links.js
  kPageLinksHtml=${page_dir}/links.html
  kPageScript=${page_dir}/report.js kPageChartJs=${CHART_JS}
  kFitHtml=${page_dir}/fit.html kFitScript=${page_dir}/fit.js
  kLiveHtml=${page_dir}/live.html kLiveScript=${page_dir}/live.js)
set(plan_page_dir ${PROJECT_SOURCE_DIR}/src/engine/plan/page)
embed(plan_page engine/plan/what_if_assets.h kWhatIfHtml=${plan_page_dir}/what_if.html
  kWhatIfStyle=${plan_page_dir}/what_if.css
  kWhatIfModel=${plan_page_dir}/what_if_model.js kWhatIfScript=${plan_page_dir}/what_if.js)
embed(published_runs engine/plan/fit/published_runs.h
  kPublishedRuns=${PROJECT_SOURCE_DIR}/bench/published/runs.csv)
set(serve_page_dir ${PROJECT_SOURCE_DIR}/src/engine/serve/page)
embed(serve_page engine/serve/serve_page_assets.h kServeHtml=${serve_page_dir}/serve.html
  kServeStyle=${serve_page_dir}/serve.css kServeMarkdown=${serve_page_dir}/markdown.js
  kServeScript=${serve_page_dir}/chat.js)
