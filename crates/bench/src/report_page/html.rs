//! Writes well-formed HTML: every element that is opened is closed, and every text is escaped.
//!
//! Invariant: nothing but this file writes `<`, and what comes from a result reaches the page
//! through [`Html::text`] or as the value of an attribute.

/// A page in the making.
#[derive(Default)]
pub struct Html {
    text: String,
}

/// The text with the characters replaced that mean something in HTML, and without those that may
/// not stand in it.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' => escaped.push(character),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

impl Html {
    fn open(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.text.push('<');
        self.text.push_str(name);
        for (attribute, value) in attributes {
            self.text.push_str(&format!(" {attribute}=\"{}\"", escape(value)));
        }
    }

    /// An element with whatever `inner` writes.
    pub fn element(
        &mut self,
        name: &str,
        attributes: &[(&str, &str)],
        inner: impl FnOnce(&mut Html),
    ) {
        self.open(name, attributes);
        self.text.push('>');
        inner(self);
        self.text.push_str(&format!("</{name}>"));
        if matches!(
            name,
            "section"
                | "table"
                | "tr"
                | "div"
                | "p"
                | "h1"
                | "h2"
                | "h3"
                | "h4"
                | "style"
                | "svg"
                | "details"
        ) {
            self.text.push('\n');
        }
    }

    /// An element that holds a text only.
    pub fn leaf(&mut self, name: &str, attributes: &[(&str, &str)], text: &str) {
        self.element(name, attributes, |html| html.text(text));
    }

    /// An element that holds nothing. Only `meta` and the elements of drawings may be written so: a
    /// browser would leave any other open.
    pub fn void(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.open(name, attributes);
        self.text.push_str("/>");
    }

    /// A text.
    pub fn text(&mut self, text: &str) {
        self.text.push_str(&escape(text));
    }

    /// The style sheet, which is this program's own.
    pub fn style(&mut self, sheet: &'static str) {
        self.element("style", &[], |html| html.text.push_str(sheet));
    }

    /// The page.
    pub fn finish(self) -> String {
        format!("<!DOCTYPE html>\n{}\n", self.text)
    }
}

/// A part that is folded up until a reader opens it.
pub fn fold(html: &mut Html, title: &str, inner: impl FnOnce(&mut Html)) {
    html.element("details", &[], |html| {
        html.leaf("summary", &[], title);
        inner(html);
    });
}

/// A table that scrolls inside itself; `headings` above, the first cell of each row to the left.
pub fn table(html: &mut Html, headings: &[&str], rows: &[Vec<String>]) {
    html.element("div", &[("class", "scroll"), ("tabindex", "0")], |html| {
        html.element("table", &[], |html| {
            html.element("thead", &[], |html| {
                html.element("tr", &[], |html| {
                    headings
                        .iter()
                        .for_each(|heading| html.leaf("th", &[("scope", "col")], heading))
                });
            });
            html.element("tbody", &[], |html| {
                for row in rows {
                    html.element("tr", &[], |html| {
                        for (index, cell) in row.iter().enumerate() {
                            if index == 0 {
                                html.leaf("th", &[("scope", "row")], cell)
                            } else {
                                html.leaf("td", &[], cell)
                            }
                        }
                    });
                }
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_attributes_are_escaped() {
        let mut html = Html::default();
        html.element("p", &[("title", "a\"b'<c>")], |html| html.text("<script>&\u{0}</script>"));
        let page = html.finish();
        assert!(page.contains("title=\"a&quot;b&#39;&lt;c&gt;\""), "{page}");
        assert!(
            page.contains("&lt;script&gt;&amp;\u{fffd}&lt;/script&gt;")
                && !page.contains("<script"),
            "{page}"
        );
    }
}
