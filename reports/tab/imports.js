// plotly, which has no exports: it leaves its name with the window.
import "./plotly.js";
