# The report's page and the chart library it is drawn with become part of the library.
find_file(CHART_JS chart.min.js PATHS /usr/share/javascript/chart.js REQUIRED
  DOC "Chart.js 3 (Debian: libjs-chart.js)")
set(page_dir ${PROJECT_SOURCE_DIR}/src/observe/page)
set(page_cc ${CMAKE_BINARY_DIR}/generated/page_assets.cc)
add_custom_command(OUTPUT ${page_cc}
  COMMAND ${CMAKE_COMMAND} -DOUT=${page_cc} -DHEADER=observe/page_assets.h
    -DFILES=kPageHtml=${page_dir}/page.html,kPageStyle=${page_dir}/style.css,kPageTimeline=${page_dir}/timeline.js,kPageScript=${page_dir}/report.js,kPageChartJs=${CHART_JS}
    -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${PROJECT_SOURCE_DIR}/cmake/embed.cmake ${page_dir}/page.html ${page_dir}/style.css
    ${page_dir}/timeline.js ${page_dir}/report.js ${CHART_JS}
  VERBATIM)
target_sources(tandem PRIVATE ${page_cc})
